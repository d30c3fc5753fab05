"""The outlook for blocks from earlier ones, and the counts for planning."""

import pytest

from cluster.speculation.estimators import ENOUGH, POSITIONS, PRIOR, AcceptanceCounts, Chances, SessionStats

NOBODY = Chances()  # whose blocks say what to expect


def p_accepted(blocks: Chances, others: Chances) -> list[float]:
    return [chance for chance, _, _ in blocks.outlook(others, POSITIONS)]


def test_survival_is_learnt_by_position_from_few_blocks():
    blocks = Chances()
    assert p_accepted(blocks, NOBODY)[:2] == list(PRIOR[:2]), "before anything was seen"
    for _ in range(8):
        blocks = blocks.after(asked=2, drafted=2, accepted=range(1))
    first, second, third, *_ = p_accepted(blocks, NOBODY)
    assert first > 0.7
    assert second < 0.15
    assert third == PRIOR[2], "nothing was asked for there"


def test_little_known_sessions_are_taken_to_fare_like_the_others():
    replica = Chances()
    for _ in range(30):
        replica = replica.after(asked=4, drafted=4, accepted=range(0))
    assert p_accepted(Chances(), replica)[0] < 0.1
    good = Chances()
    for _ in range(20):
        good = good.after(asked=4, drafted=4, accepted=range(4))
    assert p_accepted(good, replica)[0] > 0.6, "but what a session shows itself counts for more"


def test_positions_that_were_not_asked_for_for_long_are_unknown_again():
    """Or a block that was short once would stay short."""
    blocks = Chances()
    for _ in range(20):
        blocks = blocks.after(asked=3, drafted=3, accepted=range(1))
    pessimistic = p_accepted(blocks, NOBODY)[2]
    for _ in range(100):
        blocks = blocks.after(asked=1, drafted=1, accepted=range(1))
    assert pessimistic < PRIOR[2] / 2
    assert p_accepted(blocks, NOBODY)[2] == pytest.approx(PRIOR[2], abs=0.01)


def test_a_block_that_ended_in_doubt_counts_as_asked_for():
    """Otherwise the tokens that were drafted with confidence would stand for all."""
    blocks = Chances().after(asked=2, drafted=1, accepted=range(1))
    assert p_accepted(blocks, NOBODY)[1] < PRIOR[1]
    assert blocks.outlook(NOBODY, 2)[1][2] < 1.0


# ---------------------------------------------------------------- trials


def test_a_trial_is_over_after_two_rounds_unless_something_is_accepted():
    stats = SessionStats(is_left_off=True)
    stats.decided(is_asked=True, is_awaited=True, is_trial=True)
    assert stats.is_on_trial, "the first block may meet a drafter that is not ready"
    stats.decided(is_asked=True, is_awaited=True, is_trial=True)
    assert not stats.is_on_trial
    stats.block_verified(2, 2, range(1))
    assert stats.is_on_trial
    stats.decided(is_asked=True, is_awaited=True, is_trial=False)
    assert (stats.is_left_off, stats.is_on_trial) == (False, False), "it pays"
    stats.block_verified(2, 2, range(1))
    assert not stats.is_on_trial


# ---------------------------------------------------------------- counts


def counts(*blocks: tuple[int, int]) -> AcceptanceCounts:
    """Counts blocks given by requested length and accepted tokens."""
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
    """Requesting one token, because the second was rarely right, leaves the second's estimate unchanged."""
    assert counts(*[(2, 2)] * ENOUGH, *[(1, 1)] * 1000).by_position() == (1.0, 1.0)


def test_nothing_is_said_of_positions_that_were_hardly_reached():
    assert counts(*[(2, 1)] * (ENOUGH - 1)).by_position() == ()
    assert counts(*[(2, 0)] * ENOUGH, (2, 1)).by_position() == (pytest.approx(1 / (ENOUGH + 1)),)


def test_replicas_are_counted_together():
    assert counts((1, 1)) + counts((2, 1), (2, 2)) == counts((1, 1), (2, 1), (2, 2))


def test_no_more_positions_are_counted_than_pacing_tells_apart():
    assert len(counts((3 * POSITIONS, 3 * POSITIONS)).reached) == POSITIONS


def test_what_a_tree_brings_is_counted_by_its_nodes():
    """The third-likeliest token of these blocks is the one that stands, so a third is worth asking for."""
    blocks = Chances()
    for _ in range(200):
        blocks = blocks.after(asked=3, drafted=3, accepted=(0, 2))
    first, second, third = [chance for chance, _, _ in blocks.outlook(blocks, 3)]
    assert min(first, third) > 0.9 > 0.1 > second
