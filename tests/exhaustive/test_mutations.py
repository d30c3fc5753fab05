"""A hundred thousand mutated frames crash no service, disturb no honest session and leak no memory.

Not part of the default suite: `make test-mutations`.
"""

import gc
from collections.abc import Callable, Sequence

import psutil
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.mutations import (
    TO_DRAFTER,
    TO_ROUTER,
    TO_TARGET,
    Sent,
    at_drafter,
    at_router,
    at_target,
    mutated,
    unlogged,
)

FRAMES = 20  # per example
EXAMPLES = 200  # per run; hypothesis keeps a run's examples, which would look like a leak
RUNS = 100_000 // (FRAMES * EXAMPLES)
GROWTH_BYTES = 16 << 20


@pytest.mark.parametrize(
    ("frames", "service"),
    [(TO_TARGET, at_target), (TO_DRAFTER, at_drafter), (TO_ROUTER, at_router)],
    ids=["target", "drafter", "router"],
)
def test_mutated_frames_do_not_affect_other_peers(frames: dict[type, str], service: Callable[[Sequence[Sent]], None]):
    process = psutil.Process()
    used: list[int] = []
    for run in range(RUNS):

        @seed(run)
        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(mutated(tuple(frames)), min_size=FRAMES, max_size=FRAMES))
        def check(sent: list[Sent]) -> None:
            with unlogged():
                service(sent)

        check()
        gc.collect()
        used.append(process.memory_info().rss)
    grown = used[-1] - used[RUNS // 5]
    print(f"{RUNS * EXAMPLES * FRAMES} frames; memory grew by {grown / 2**20:.0f} MiB after the first fifth")
    assert grown < GROWTH_BYTES
