"""Lost and hung processes under sixteen streams fail no request and change no token. Prints the worst stall.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import pytest

from tests.integration.serving import Served, demo_served
from tests.integration.test_serving import assert_nothing_left, eventually

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 64
ROUNDS = 5  # per kind of loss, because the machine itself sometimes delays a stream
GREEDY: dict[str, object] = {"temperature": 0.0}
TOPICS = ("rivers", "trains", "bread", "the moon", "chess", "bees", "glass", "volcanoes")
STREAMS = [(f"Explain to a child something about {topic}.", GREEDY) for topic in TOPICS] + [
    (f"Tell me a story about {topic}.", {"temperature": 0.8, "seed": seed}) for seed, topic in enumerate(TOPICS)
]
# One core for the targets' ranks, and one for drafters and all other processes.
PINNED = ("target.resources_per_rank.cpu_affinity=[0]", "draft.resources.cpu_affinity=[1]")


@dataclass(frozen=True)
class Streamed:
    """Texts of all streams, with the longest and the median time between two chunks.

    The longest time counts only after all streams have started, because prompts delay other streams.
    """

    texts: list[str]
    worst_gap_s: float
    usual_gap_s: float


@pytest.fixture(scope="module")
def second_core() -> Iterator[None]:
    """Keeps all processes except targets off the first core, including drafters that start later.

    Targets pin themselves to the first core.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {1})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def served(second_core: None) -> Iterator[Served]:
    with demo_served(
        "target.replicas={min: 2, max: 2}",
        "draft.replicas={min: 2, max: 2}",
        "model.max_context=512",
        *PINNED,
    ) as served:
        yield served
        assert_nothing_left(served)


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> list[Streamed]:
    asyncio.run(stream_all(served))  # warm-up
    found = [asyncio.run(stream_all(served)) for _ in range(ROUNDS)]
    assert all(one.texts == found[0].texts for one in found)
    return found


@pytest.fixture(scope="module")
def plain_step_s(served: Served) -> float:
    """Returns the median time between two tokens of a stream without speculation."""
    return asyncio.run(stream_all(served, speculation={"draft_tokens": 0})).usual_gap_s


async def stream_all(
    served: Served, disturb: Callable[[], None] | None = None, speculation: dict[str, object] | None = None
) -> Streamed:
    """Runs all streams concurrently; calls `disturb` in a thread once all have begun to answer."""
    begun = 0
    everybody = asyncio.Event()
    arrivals: list[list[float]] = []
    all_begun_at = math.inf

    async def one(prompt: str, sampling: dict[str, object]) -> str:
        nonlocal begun, all_begun_at
        text = ""
        times = []
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
                    all_begun_at = times[-1]
                    everybody.set()
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        arrivals.append(times)
        return text

    async def disturbance() -> None:
        await everybody.wait()
        if disturb is not None:
            await asyncio.to_thread(disturb)

    async with served.async_client as client:
        *texts, _ = await asyncio.gather(*(one(*stream) for stream in STREAMS), disturbance())
    gaps = [(before, after) for times in arrivals for before, after in itertools.pairwise(times)]
    worst = max(after - before for before, after in gaps if after > all_begun_at)
    return Streamed([str(text) for text in texts], worst, median(after - before for before, after in gaps))


def pids(served: Served, deployment: str) -> list[int]:
    return [replica["pid"] for replica in served.inspect(deployment)]


def has_two(served: Served, deployment: str, besides: Sequence[int] = ()) -> bool:
    """Returns whether the pool has two live replicas."""
    return len(set(pids(served, deployment)) - set(besides)) == 2


def report(what: str, found: Sequence[Streamed], undisturbed: Sequence[Streamed], plain_step_s: float) -> None:
    print(
        f"\n{what}: worst stall, {_in_steps(found, plain_step_s)}; undisturbed, {_in_steps(undisturbed, plain_step_s)};"
        f" a plain step is {1e3 * plain_step_s:.0f} ms"
    )


def _in_steps(found: Sequence[Streamed], plain_step_s: float) -> str:
    worst = sorted(one.worst_gap_s / plain_step_s for one in found)
    return f"median of {len(worst)}: {median(worst):.1f} plain steps ({worst[0]:.1f} to {worst[-1]:.1f})"


@pytest.mark.parametrize("failure_signal", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_drafters_lost_one_after_another(
    served: Served, undisturbed: list[Streamed], plain_step_s: float, failure_signal: signal.Signals
) -> None:
    found = []
    for _ in range(ROUNDS):
        before = await asyncio.to_thread(pids, served, "Drafter")

        def lose_all(before: Sequence[int] = tuple(before)) -> None:
            for pid in before:
                os.kill(pid, failure_signal)
                time.sleep(1)

        try:
            found.append(await stream_all(served, lose_all))
        finally:
            if failure_signal is signal.SIGSTOP:
                for pid in before:
                    os.kill(pid, signal.SIGCONT)
        assert found[-1].texts == undisturbed[0].texts
        lost = before if failure_signal is signal.SIGKILL else ()
        await asyncio.to_thread(eventually, partial(has_two, served, "Drafter", lost), "there are two again", 180)
    report(f"drafters {failure_signal.name}", found, undisturbed, plain_step_s)
    again = await stream_all(served)
    assert again.texts == undisturbed[0].texts


async def test_a_lost_target_rank(served: Served, undisturbed: list[Streamed], plain_step_s: float) -> None:
    found = []
    for _ in range(ROUNDS):
        replica = (await asyncio.to_thread(served.inspect, "Target"))[0]
        found.append(await stream_all(served, partial(os.kill, replica["rank_pids"][0], signal.SIGKILL)))
        assert found[-1].texts == undisturbed[0].texts
        lost = (replica["pid"],)
        await asyncio.to_thread(eventually, partial(has_two, served, "Target", lost), "there are two again", 180)
    report("target rank SIGKILL", found, undisturbed, plain_step_s)
