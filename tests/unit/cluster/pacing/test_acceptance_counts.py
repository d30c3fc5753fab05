"""What is counted of blocks for whoever plans a replica."""

import pytest

from cluster.pacing.acceptance import POSITIONS
from cluster.pacing.acceptance_counts import ENOUGH, AcceptanceCounts


def counts(*blocks: tuple[int, int]) -> AcceptanceCounts:
    """Of blocks: how long each was to be, and how much of it was accepted."""
    found = AcceptanceCounts()
    for asked, accepted in blocks:
        found = found.after(asked, accepted)
    return found


def test_a_position_is_counted_where_all_before_it_was_accepted():
    assert counts((3, 3), (3, 1), (3, 0), (1, 1)) == AcceptanceCounts(reached=(4, 2, 1), accepted=(3, 1, 1))


def test_chances_are_given_those_before():
    found = counts(*[(3, 3)] * 40, *[(3, 1)] * 40, *[(3, 0)] * 20)
    assert found.by_position() == pytest.approx((0.8, 0.5, 1.0))


def test_short_blocks_say_nothing_of_further_positions():
    """Whoever asks for one token, because the second was rarely right, makes the second no worse."""
    assert counts(*[(2, 2)] * ENOUGH, *[(1, 1)] * 1000).by_position() == (1.0, 1.0)


def test_nothing_is_said_of_positions_that_were_hardly_reached():
    assert counts(*[(2, 1)] * (ENOUGH - 1)).by_position() == ()
    assert counts(*[(2, 0)] * ENOUGH, (2, 1)).by_position() == (pytest.approx(1 / (ENOUGH + 1)),)


def test_replicas_are_counted_together():
    assert counts((1, 1)) + counts((2, 1), (2, 2)) == counts((1, 1), (2, 1), (2, 2))


def test_no_more_positions_are_counted_than_pacing_tells_apart():
    assert len(counts((3 * POSITIONS, 3 * POSITIONS)).reached) == POSITIONS
