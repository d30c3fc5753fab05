"""A deployment with a vLLM target and a target with Slipstream's engine changes no token if either is lost.

Uses the demo pair on real Ray and HTTP with a real drafter, and `generate` as the reference.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from serve_app.cli.demo import demo_config
from tests.integration.serving import Reference, Served, demo_served
from tests.vllm.test_ray import VLLM, ask, bench_prompts, eventually, stream_and_disturb

ENGINES = ("slipstream", "vllm")
AT_ONCE = 4
STREAMED = 64
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    if not Path(demo_config().model.target).is_dir():
        pytest.skip("the demo's target model is not there; run `make models`")
    with demo_served(*VLLM, "target.engine=mixed") as served:
        yield served
        for deployment in ("Router", "Drafter", "Target"):
            eventually(lambda d=deployment: all(r["idle"] for r in served.inspect(d)), f"{deployment} holds nothing")


@pytest.fixture(scope="module")
def reference(served: Served) -> Reference:
    return Reference(served.config.model.target)


def of_engine(served: Served, engine: str) -> dict[str, Any]:
    (found,) = [replica for replica in served.inspect("Target") if replica["engine"] == engine]
    return found


def test_both_engines_serve_and_greedy_text_equals_generate(served: Served, reference: Reference) -> None:
    prompts = bench_prompts()[:8]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        texts = list(pool.map(lambda prompt: ask(served, prompt), prompts))
    for prompt, text in zip(prompts, texts, strict=True):
        reference.assert_greedy(prompt, NEW_TOKENS, text)
    assert {replica["engine"]: replica["accepted_tokens"] > 0 for replica in served.inspect("Target")} == dict.fromkeys(
        ENGINES, True
    )


@pytest.mark.parametrize("lost", ENGINES)
def test_streams_of_either_engine_continue_on_the_other(served: Served, reference: Reference, lost: str) -> None:
    """One replica is killed after all streams have started; the other takes over its streams."""
    prompts = bench_prompts()[:AT_ONCE]
    before = _handed_over(served)
    struck = Barrier(AT_ONCE, action=lambda: os.kill(_busy(served, lost), signal.SIGKILL))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        texts = list(pool.map(lambda prompt: stream_and_disturb(served, prompt, 5, struck.wait), prompts))
    for prompt, text in zip(prompts, texts, strict=True):
        reference.assert_greedy(prompt, STREAMED, text)
    assert _handed_over(served) > before
    eventually(lambda: _engines(served) == sorted(ENGINES), "Serve has replaced the replica by its like", 240)


def _busy(served: Served, engine: str) -> int:
    replica = of_engine(served, engine)
    assert replica["sessions"], f"no stream was with the target of {engine}"
    return int(replica["pid"])


def _handed_over(served: Served) -> int:
    (router,) = served.inspect("Router")
    return sum(count for (pool, cause), count in router["handovers"].items() if (pool, cause) == ("target", "lost"))


def _engines(served: Served) -> list[str]:
    return sorted(replica["engine"] for replica in served.inspect("Target"))
