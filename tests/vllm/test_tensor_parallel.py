"""Two vLLM ranks in separate processes give the same texts as one rank of Slipstream's own engine."""

from pathlib import Path

import pytest

from tests.vllm.cases import assert_scored_alike, config, on_vllm, open_all
from tests.vllm.scripted import VOCABULARY, Life, Scripts


def test_two_vllm_ranks_agree_with_the_own_engine(
    tiny_llama: Path, whole: dict[str, list[int]], own_lives: dict[str, Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.vllm_engine.core import start_core

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    core = start_core(config(tiny_llama, ranks=2), str(tiny_llama), VOCABULARY)
    try:
        target = on_vllm(core)
        open_all(target)
        target.run(Scripts(whole, seed=3).mixed)
        assert {session: life.prefix.tokens for session, life in target.lives.items()} == whole
        assert_scored_alike(target.lives, own_lives)
        assert sum(life.accepted for life in target.lives.values()) > 0
        assert core.is_idle
    finally:
        core.close()
