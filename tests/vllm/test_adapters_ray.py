"""Tests a deployment of LoRA adapters with two vLLM targets and one drafter, on real Ray and HTTP."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.config import validated
from serve_app.operations.local import serving
from tests.byte_tokenizer import byte_tokenizer
from tests.integration.serving import Served
from tests.integration.test_several_models import samples
from tests.vllm.adapters import ADAPTERS, NEW_TOKENS, PROMPTS
from tests.vllm.cases import config
from tests.vllm.test_ray import eventually

MODELS = ("base", *ADAPTERS)
ASKED = [(name, at) for name in MODELS for at in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(adapted: dict[str, list[int]]) -> dict[tuple[str, int], str]:
    """Returns unmodified vLLM's greedy texts."""
    decode = byte_tokenizer().decode
    texts = {}
    for name, at in ASKED:
        tokens = adapted[f"{name if name in ADAPTERS else ''}-{at}"]
        texts[name, at] = decode(tokens[len(PROMPTS[at]) :], skip_special_tokens=True)
    return texts


@pytest.fixture(scope="module")
def served(tiny_llama: Path, adapters: dict[str, str], expected: dict[tuple[str, int], str]) -> Iterator[Served]:
    """Drafts continue earlier answers, so that a repeated request has right drafts."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    given = config(tiny_llama, draft={"method": "suffix"}, adapters=adapters, enable_lora=True).given()
    given["model"] |= {"served_name": "base"}
    given["target"] |= {"replicas": {"min": 2, "max": 2}, "resources_per_rank": {"num_cpus": 0.3}}
    given["speculation"] |= {"schedule": "lock_step"}
    two_targets = validated({**given, "server": {"port": 0, "audit": {"share": 1}}})
    with serving(two_targets, Console(quiet=True)) as url:
        yield Served(url, two_targets)


def complete(served: Served, model: str, at: int, **fields: Any) -> Any:
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    options = {"max_tokens": NEW_TOKENS, "temperature": 0, "extra_body": extra, **fields}
    return served.client.completions.create(model=model, prompt=PROMPTS[at], **options)


def text_of(served: Served, model: str, at: int, **fields: Any) -> str:
    return str(complete(served, model, at, **fields).choices[0].text)


def test_one_drafter_drafts_for_the_base_and_its_adapters(served: Served, expected: dict[tuple[str, int], str]) -> None:
    assert [card.id for card in served.client.models.list().data] == list(MODELS)
    with ThreadPoolExecutor(len(ASKED)) as pool:
        for _ in range(3):
            texts = pool.map(lambda one: text_of(served, *one), ASKED)
            assert dict(zip(ASKED, texts, strict=True)) == expected
    assert len(served.inspect("Drafter")) == 1
    for name in MODELS:
        (accepted,) = samples(served, "slipstream_accepted_tokens_total", model=name)
        assert accepted.value > 0, f"no draft for {name} was accepted"


@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_drawn_text(served: Served, name: str) -> None:
    drawn = {"temperature": 1, "seed": 5}
    plain = text_of(served, name, 0, **drawn, extra_body={"speculation": {"draft_tokens": 0}})
    assert {text_of(served, name, 0, **drawn) for _ in range(3)} == {plain}


def test_audits_apply_the_adapter(served: Served) -> None:
    def audited(outcome: str) -> int:
        return sum(router["audits"][outcome] for router in served.inspect("Router"))

    eventually(lambda: audited("equal") >= len(ASKED), "the requests so far are audited")
    assert audited("differs") == 0


def test_a_session_moves_with_its_adapter(served: Served, expected: dict[tuple[str, int], str]) -> None:
    def busy() -> list[int]:
        return [replica["pid"] for replica in served.inspect("Target") if not replica["idle"]]

    def is_idle() -> bool:
        """Returns whether no audit of an earlier request starts for two seconds."""
        return not any(busy() or time.sleep(0.1) for _ in range(20))

    eventually(is_idle, "audits of earlier requests have ended")
    pieces = []
    for event in complete(served, "loud", 1, stream=True, extra_body={"speculation": {"draft_tokens": 0}}):
        pieces.append(event.choices[0].text)
        if len(pieces) == 5:
            (pid,) = busy()
            os.kill(pid, signal.SIGKILL)
    assert "".join(pieces) == expected["loud", 1]
    moved = samples(served, "slipstream_handovers_total", pool="target", model="base")
    assert sum(one.value for one in moved) > 0
