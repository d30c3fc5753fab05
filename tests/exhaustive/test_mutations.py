"""A hundred thousand mutated frames at each service: nobody falls, honest sessions go on, and memory stays flat.

Not part of the default suite: `make test-mutations`.
"""

from collections.abc import Callable, Sequence

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.mutations import TO_DRAFTER, TO_ROUTER, TO_TARGET, Sent, at_drafter, at_router, at_target, mutated, unlogged

FRAMES = 20  # of an example
EXAMPLES = 100_000 // FRAMES
GROWTH_BYTES = 64 << 20  # of which hypothesis itself, which remembers its examples, takes the most


@pytest.mark.parametrize(
    ("frames", "service"),
    [(TO_TARGET, at_target), (TO_DRAFTER, at_drafter), (TO_ROUTER, at_router)],
    ids=["target", "drafter", "router"],
)
def test_mutated_frames_cost_nobody_else_anything(frames: dict[type, str], service: Callable[[Sequence[Sent]], None]):
    process = psutil.Process()
    used: list[int] = []

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(mutated(tuple(frames)), min_size=FRAMES, max_size=FRAMES))
    def check(sent: list[Sent]) -> None:
        with unlogged():
            service(sent)
        used.append(process.memory_info().rss)

    check()
    grown = used[-1] - used[len(used) // 5]
    print(f"{len(used) * FRAMES} frames; memory grew by {grown / 2**20:.0f} MiB after the first fifth")
    assert grown < GROWTH_BYTES
