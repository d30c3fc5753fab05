"""Lost and hung processes under sixteen streams: no request fails, no token changes; the worst stall is printed.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import pytest

from tests.integration.serving import Served, demo_served
from tests.integration.test_serving import assert_nothing_left, eventually

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 64
GREEDY: dict[str, object] = {"temperature": 0.0}
TOPICS = ("rivers", "trains", "bread", "the moon", "chess", "bees", "glass", "volcanoes")
STREAMS = [(f"Explain to a child something about {topic}.", GREEDY) for topic in TOPICS] + [
    (f"Tell me a story about {topic}.", {"temperature": 0.8, "seed": seed}) for seed, topic in enumerate(TOPICS)
]
# A core for the targets, and one for the drafters and whatever else there is, new drafters that start included.
PINNED = ("target.resources_per_rank.cpu_affinity=[0]", "draft.resources.cpu_affinity=[1]")


@dataclass(frozen=True)
class Streamed:
    """The texts of all streams, and the longest and the usual time between two chunks of one."""

    texts: list[str]
    worst_gap_s: float
    usual_gap_s: float


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with demo_served(
        "target.replicas={min: 2, max: 2}",
        "draft.replicas={min: 2, max: 2}",
        "model.max_context=512",
        *PINNED,
    ) as served:
        yield served
        assert_nothing_left(served)


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> Streamed:
    asyncio.run(stream_all(served))  # what happens for the first time takes longer
    return asyncio.run(stream_all(served))


@pytest.fixture(scope="module")
def plain_step_s(served: Served) -> float:
    """The usual time between two tokens of a stream when all decode plainly."""
    return asyncio.run(stream_all(served, speculation={"max_draft_tokens": 0})).usual_gap_s


async def stream_all(
    served: Served, disturb: Callable[[], None] | None = None, speculation: dict[str, object] | None = None
) -> Streamed:
    """All streams at once; `disturb` is called, in a thread of its own, once all have begun to answer."""
    client, begun, everybody = served.async_client, 0, asyncio.Event()
    gaps: list[list[float]] = []

    async def one(prompt: str, sampling: dict[str, object]) -> str:
        nonlocal begun
        text, times = "", []
        async for chunk in await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            stream=True,
            extra_body={"speculation": speculation or {}},
            **sampling,  # type: ignore[call-overload]
        ):
            times.append(time.monotonic())
            if len(times) == 4:
                begun += 1
                if begun == len(STREAMS):
                    everybody.set()
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        gaps.append([after - before for before, after in itertools.pairwise(times)])
        return text

    async def disturbance() -> None:
        await everybody.wait()
        if disturb is not None:
            await asyncio.to_thread(disturb)

    *texts, _ = await asyncio.gather(*(one(*stream) for stream in STREAMS), disturbance())
    every = [gap for found in gaps for gap in found]
    return Streamed([str(text) for text in texts], max(every), median(every))


def pids(served: Served, deployment: str) -> list[int]:
    return [replica["pid"] for replica in served.inspect(deployment)]


def report(what: str, found: Streamed, undisturbed: Streamed, plain_step_s: float) -> None:
    same = sum(one == other for one, other in zip(found.texts, undisturbed.texts, strict=True))
    print(
        f"\n{what}: {same} of {len(STREAMS)} texts unchanged; worst stall {found.worst_gap_s / plain_step_s:.1f} plain "
        f"steps of {1e3 * plain_step_s:.0f} ms; undisturbed {undisturbed.worst_gap_s / plain_step_s:.1f}"
    )


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_drafters_lost_one_after_another(
    served: Served, undisturbed: Streamed, plain_step_s: float, blow: signal.Signals
) -> None:
    before = await asyncio.to_thread(pids, served, "Drafter")

    def lose_all() -> None:
        for pid in before:
            os.kill(pid, blow)
            time.sleep(1)

    found = await stream_all(served, lose_all)
    if blow is signal.SIGSTOP:
        for pid in before:
            os.kill(pid, signal.SIGCONT)
    report(f"drafters {blow.name}", found, undisturbed, plain_step_s)
    assert found.texts == undisturbed.texts
    await asyncio.to_thread(eventually, lambda: len(pids(served, "Drafter")) == 2, "there are two drafters again", 180)
    again = await stream_all(served)
    assert again.texts == undisturbed.texts


async def test_a_lost_target_rank(served: Served, undisturbed: Streamed, plain_step_s: float) -> None:
    replicas = await asyncio.to_thread(served.inspect, "Target")
    found = await stream_all(served, lambda: os.kill(replicas[0]["rank_pids"][0], signal.SIGKILL))
    report("target rank SIGKILL", found, undisturbed, plain_step_s)
    assert found.texts == undisturbed.texts
    await asyncio.to_thread(eventually, lambda: len(pids(served, "Target")) == 2, "there are two targets again", 180)
