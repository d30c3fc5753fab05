"""LoRA adapters of a vLLM target give the texts of unmodified vLLM, for any blocks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import ModelError
from protos.messages import GREEDY, Sampling
from tests.vllm.adapters import ADAPTERS, ASKED, NEW_TOKENS, PROMPTS
from tests.vllm.cases import config, on_vllm
from tests.vllm.scripted import VOCABULARY, Script, ScriptedTarget, Scripts, request


@pytest.fixture(scope="module")
def core(tiny_llama: Path, adapters: dict[str, str], adapted: dict[str, list[int]]) -> Iterator[object]:
    from actors.vllm_engine.core import start_core

    started = start_core(config(tiny_llama, adapters=adapters, enable_lora=True), str(tiny_llama), VOCABULARY)
    yield started
    started.close()


def opened(core: object, sampling: Sampling) -> ScriptedTarget:
    target = on_vllm(core, ADAPTERS)
    for session, (name, prompt) in ASKED.items():
        target.open(request(session, sampling, prompt, NEW_TOKENS, adapter=name))
    return target


def texts(target: ScriptedTarget) -> dict[str, list[int]]:
    return {session: life.prefix.tokens for session, life in target.lives.items()}


def test_the_adapters_change_the_text(adapted: dict[str, list[int]]) -> None:
    assert len({tuple(tokens[len(PROMPTS[0]) :]) for tokens in adapted.values()}) == len(ASKED)


@pytest.mark.parametrize("kind", ["none", "right", "wrong", "mixed"])
def test_texts_equal_plain_vllms_for_any_blocks(core: object, adapted: dict[str, list[int]], kind: str) -> None:
    target = opened(core, GREEDY)
    script: Script = getattr(Scripts(adapted, seed=5), kind)
    target.run(script)
    assert texts(target) == adapted
    assert all((life.accepted > 0) == (kind in ("right", "mixed")) for life in target.lives.values())
    assert core.is_idle


def test_blocks_change_no_drawn_token(core: object) -> None:
    plain = opened(core, Sampling())
    plain.run(Scripts({}).none)
    for kind in ("right", "wrong"):
        target = opened(core, Sampling())
        target.run(getattr(Scripts(texts(plain)), kind))
        assert texts(target) == texts(plain)


def test_a_moved_session_keeps_its_adapter(core: object, adapted: dict[str, list[int]]) -> None:
    target = opened(core, GREEDY)

    def move_all(step: int) -> None:
        for session, life in list(target.lives.items()) if step == 20 else ():
            assert not life.is_over
            target.close(session)
            target.open(replace(life.open, attempt=2, tokens=tuple(life.prefix.tokens)))

    target.run(Scripts(adapted).wrong, move_all)
    assert texts(target) == adapted


def test_an_unusable_adapter_is_refused_at_the_start(tiny_llama: Path, tmp_path: Path, core: object) -> None:
    from actors.vllm_engine.core import start_core

    bad = config(tiny_llama, adapters={"bad": str(tmp_path)}, enable_lora=True)
    with pytest.raises(ModelError, match=r"adapter bad: .*; correct target\.adapters"):
        start_core(bad, str(tiny_llama), VOCABULARY)
