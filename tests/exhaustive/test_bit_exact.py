"""Tests that `model.numerics: invariant` gives every answer the same bytes in bfloat16, whatever else runs.

Each prompt is first answered alone and without speculation. The same text must follow at other concurrencies, with
chains and trees, on one rank and three, with cached prefixes, preempted sessions, chunked prompts and a lost target.
The reference loop drafts in every round. SmolLM2 has a draft model; Gemma 3 has n-grams, and is skipped if the package
registry lacks its weights.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import pytest

from serve_app.demo_data import BENCH_PROMPTS
from tests.exhaustive.gemma3 import Unavailable, prepare_gemma3
from tests.exhaustive.shaped_target import CHAIN, TREE, verified
from tests.integration.serving import Served, built_by, demo_served

PROMPTS = [json.loads(line)["prompt"] for line in BENCH_PROMPTS.read_text().splitlines()]
MAX_TOKENS = 96
PRESSED_TOKENS = 64  # per answer of the tests with preemption and a lost target
SHAPES = {"plain": 0, "chains": CHAIN, "trees": TREE}
SAMPLING = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 7}}
COMMON = (
    "model.numerics=invariant",
    "model.dtype=bfloat16",
    "speculation.schedule=lock_step",
    f"speculation.draft_tokens={TREE}",
    "target.max_sessions=32",
    "target.resources_per_rank.num_cpus=0.3",
    "draft.max_sessions=32",
    "server.target_wait_s=300",
)
# A cache for fewer than eight sessions, and prompts in chunks; a page of SmolLM2's sixteen tokens takes 360 KiB.
PRESSED = ("model.max_context=1024", "target.cache_per_rank.gib=0.025", "target.max_step_tokens=48")


async def answers(served: Served, prompts: list[str], at_once: int, tokens: int, **options: object) -> list[str]:
    places = asyncio.Semaphore(at_once)

    async def one(prompt: str) -> str:
        async with places:
            answer = await client.completions.create(
                model=served.config.model.name,
                prompt=prompt,
                max_tokens=tokens,
                **options,  # type: ignore[call-overload]
            )
        return str(answer.choices[0].text)

    async with served.async_client as client:
        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def with_blocks(shape: str) -> dict[str, object]:
    return {"extra_body": {"speculation": {"draft_tokens": SHAPES[shape]}, "ignore_eos": True}}


def count_differing(found: list[str], expected: list[str]) -> int:
    return sum(text != other for text, other in zip(found, expected, strict=True))


def gemma_settings() -> tuple[str, ...]:
    try:
        folder = prepare_gemma3()
    except Unavailable as error:
        pytest.skip(str(error))
    return f"model.target={folder}", "draft={method: ngram, resources: {num_cpus: 0.3}}", "target.step_timeout_s=300"


SETTINGS = {
    "1 rank": (),
    "3 ranks": ("target.tensor_parallel=3",),
    "pressure": PRESSED,
}


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    own = gemma_settings() if request.param == "Gemma 3" else SETTINGS[request.param]
    with built_by("tests.exhaustive.shaped_target:build"), demo_served(*COMMON, *own) as served:
        assert [target["numerics"] for target in served.inspect("Target")] == [["invariant"]]
        yield served


@pytest.mark.parametrize("served", ["1 rank", "3 ranks", "Gemma 3"], indirect=True)
@pytest.mark.parametrize("sampling", SAMPLING)
async def test_bytes_depend_on_nothing_else_in_the_step(served: Served, sampling: str) -> None:
    """Later answers also find their prompts in the prefix cache."""
    options = SAMPLING[sampling]
    before = await asyncio.to_thread(verified, served)
    alone = await answers(served, PROMPTS, 1, MAX_TOKENS, **with_blocks("plain"), **options)
    assert len(set(alone)) == len(alone)
    differing = {}
    for shape in SHAPES:
        for at_once in (1, 8, 16, 32):
            if (shape, at_once) != ("plain", 1):
                again = await answers(served, PROMPTS, at_once, MAX_TOKENS, **with_blocks(shape), **options)
                differing[shape, at_once] = count_differing(again, alone)
    print(f"\n{sampling}: " + ", ".join(f"{shape} at {at} {count}" for (shape, at), count in differing.items()))
    assert not any(differing.values())
    blocks = await asyncio.to_thread(verified, served) - before
    assert blocks["trees"] > 100
    assert blocks["chains of several"] > 100
    assert blocks["several accepted"] > 100


@pytest.mark.parametrize("served", ["pressure"], indirect=True)
@pytest.mark.parametrize("sampling", SAMPLING)
async def test_bytes_survive_preemption_chunks_and_a_lost_target(served: Served, sampling: str) -> None:
    options = SAMPLING[sampling]
    alone = await answers(served, PROMPTS, 1, PRESSED_TOKENS, **with_blocks("plain"), **options)
    (target,) = await asyncio.to_thread(served.inspect, "Target")
    for shape in SHAPES:
        again = await answers(served, PROMPTS, 16, PRESSED_TOKENS, **with_blocks(shape), **options)
        assert count_differing(again, alone) == 0, shape
    (later,) = await asyncio.to_thread(served.inspect, "Target")
    assert later["preempted"] > target["preempted"]

    async def kill() -> None:
        await asyncio.sleep(2)  # into the answers
        os.kill(target["rank_pids"][0], signal.SIGKILL)

    again, _ = await asyncio.gather(
        answers(served, PROMPTS, 16, PRESSED_TOKENS, **with_blocks("trees"), **options), kill()
    )
    assert count_differing(again, alone) == 0
    (reborn,) = await asyncio.to_thread(served.inspect, "Target")
    assert reborn["pid"] != target["pid"]
