"""A drafter's session limit follows the timeliness of its blocks."""

import pytest

from cluster.drafting.session_table import Capacity


def blocks_until_shed(capacity: Capacity, late: float, sessions: int) -> tuple[int, int]:
    """Records blocks, with this share of them late, until the drafter sheds sessions.

    Returns the numbers of blocks and of shed sessions, possibly 0.
    """
    for blocks in range(1, 2000):
        if excess := capacity.note(int(blocks * late) > int((blocks - 1) * late), sessions):
            return blocks, excess
    return blocks, 0


def test_a_quarter_of_the_sessions_is_given_up_while_most_blocks_are_late():
    capacity = Capacity(64)
    for sessions, given_up in ((16, 4), (12, 3), (2, 1)):
        blocks, excess = blocks_until_shed(capacity, 0.95, sessions)
        assert excess == given_up
        assert capacity.sessions == sessions - given_up
        assert blocks > 16
    assert blocks_until_shed(capacity, 0.95, 1)[1] == 0, "the last session competes with no other"
    assert capacity.sessions == 1


def test_capacity_grows_back_step_by_step_while_blocks_are_in_time():
    capacity = Capacity(12)
    blocks_until_shed(capacity, 0.95, 12)
    steps = [capacity.sessions]
    for _ in range(2000):
        assert capacity.note(late=False, sessions=9) == 0
        if capacity.sessions != steps[-1]:
            steps.append(capacity.sessions)
    assert steps == [9, 10, 11, 12]


@pytest.mark.parametrize("late", [0.25, 0.5, 0.8])
def test_some_late_blocks_neither_shrink_nor_grow_the_capacity(late):
    capacity = Capacity(16)
    blocks_until_shed(capacity, 0.95, 16)
    assert blocks_until_shed(capacity, late, 8)[1] == 0
    assert capacity.sessions == 12


def test_more_sessions_are_observed_for_more_blocks():
    few, many = (blocks_until_shed(Capacity(64), 1.0, sessions)[0] for sessions in (8, 64))
    assert few < many
