"""A few thousand mutated frames crash no service, disturb no honest session and leak nothing.

`tests/exhaustive/test_mutations.py` uses a hundred thousand frames.
"""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mutations import (
    SENSIBLE,
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

FRAMES = 12  # per example
SERVICES = pytest.mark.parametrize(
    ("frames", "service"),
    [(TO_TARGET, at_target), (TO_DRAFTER, at_drafter), (TO_ROUTER, at_router)],
    ids=["target", "drafter", "router"],
)


@SERVICES
def test_mutated_frames_do_not_affect_other_peers(frames: dict[type, str], service: Callable[[Sequence[Sent]], None]):
    @settings(max_examples=150)
    @given(st.lists(mutated(tuple(frames)), min_size=FRAMES, max_size=FRAMES))
    def check(sent: list[Sent]) -> None:
        with unlogged():
            service(sent)

    check()


@SERVICES
def test_unmutated_seed_messages_are_accepted(frames: dict[type, str], service: Callable[[Sequence[Sent]], None]):
    """The unmutated frames are valid, separately and in sequence, so mutated frames reach the services' logic."""
    everything = [Sent(frame, data) for frame in frames for data in SENSIBLE[frame]]
    with unlogged():
        service(everything)
        service([*everything, *reversed(everything)])
