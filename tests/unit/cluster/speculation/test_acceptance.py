"""Tests acceptance estimates from earlier blocks, and acceptance counts."""

from collections import Counter

import pytest

from cluster.speculation.estimators import AcceptanceCounts, Chances, SessionStats

NOBODY = Chances()  # without other sessions' blocks


def p_accepted(blocks: Chances, others: Chances) -> list[float]:
    return [chance for chance, _, _ in blocks.expectations_of(others, 4)]


UNKNOWN = p_accepted(Chances(), NOBODY)


def test_acceptance_is_learnt_by_position_from_few_blocks():
    blocks = Chances()
    assert 1 > UNKNOWN[0] > UNKNOWN[1] > UNKNOWN[2] > 0
    for _ in range(8):
        blocks = blocks.after(requested=2, drafted=2, accepted=range(1))
    first, second, third, _ = p_accepted(blocks, NOBODY)
    assert first > 0.7
    assert second < 0.15
    assert third == UNKNOWN[2], "nothing was requested there"


def test_a_little_known_session_is_estimated_from_the_others():
    replica = Chances()
    for _ in range(30):
        replica = replica.after(requested=4, drafted=4, accepted=range(0))
    assert p_accepted(Chances(), replica)[0] < 0.1
    good = Chances()
    for _ in range(20):
        good = good.after(requested=4, drafted=4, accepted=range(4))
    assert p_accepted(good, replica)[0] > 0.6, "the session's own blocks weigh more"


def test_positions_without_requests_for_long_become_unknown_again():
    """Otherwise blocks that became short once would stay short."""
    blocks = Chances()
    for _ in range(20):
        blocks = blocks.after(requested=3, drafted=3, accepted=range(1))
    pessimistic = p_accepted(blocks, NOBODY)[2]
    for _ in range(100):
        blocks = blocks.after(requested=1, drafted=1, accepted=range(1))
    assert pessimistic < UNKNOWN[2] / 2
    assert p_accepted(blocks, NOBODY)[2] == pytest.approx(UNKNOWN[2], abs=0.01)


def test_a_block_that_ended_in_doubt_counts_at_its_requested_length():
    """Otherwise only tokens drafted with confidence would count."""
    blocks = Chances().after(requested=2, drafted=1, accepted=range(1))
    assert p_accepted(blocks, NOBODY)[1] < UNKNOWN[1]
    assert blocks.expectations_of(NOBODY, 2)[1][2] < 1.0


# ---------------------------------------------------------------- trials


def test_a_trial_is_over_after_two_rounds_unless_something_is_accepted():
    stats = SessionStats(is_disabled=True)
    stats.request_sent(is_sent=True, is_awaited=True, is_trial=True)
    assert stats.is_on_trial, "the first block may meet a drafter that is not ready"
    stats.request_sent(is_sent=True, is_awaited=True, is_trial=True)
    assert not stats.is_on_trial
    stats.block_verified(2, 2, range(1))
    assert stats.is_on_trial
    stats.request_sent(is_sent=True, is_awaited=True, is_trial=False)
    assert (stats.is_disabled, stats.is_on_trial) == (False, False), "it pays"
    stats.block_verified(2, 2, range(1))
    assert not stats.is_on_trial


# ---------------------------------------------------------------- counts


def counts(*blocks: tuple[int, int]) -> AcceptanceCounts:
    """Returns the counts of blocks, each given by its requested and accepted tokens."""
    return AcceptanceCounts.of(Counter(blocks))


def test_a_position_counts_if_all_positions_before_it_were_accepted():
    assert counts((3, 3), (3, 1), (3, 0), (1, 1)) == AcceptanceCounts(reached=(4, 2, 1), accepted=(3, 1, 1))


def test_rates_are_conditional_on_the_positions_before():
    found = counts(*[(3, 3)] * 40, *[(3, 1)] * 40, *[(3, 0)] * 20)
    assert found.by_position() == pytest.approx((0.8, 0.5, 1.0))


def test_short_blocks_leave_further_positions_unchanged():
    """Requests for one token, after many wrong second tokens, leave the second position's estimate unchanged."""
    assert counts(*[(2, 2)] * 100, *[(1, 1)] * 1000).by_position() == (1.0, 1.0)


def test_rarely_reached_positions_have_no_rate():
    assert counts((2, 1), (2, 1)).by_position() == ()
    assert counts(*[(2, 0)] * 99, (2, 1)).by_position() == (pytest.approx(0.01),)


def test_counts_of_replicas_add_up():
    assert counts((1, 1)) + counts((2, 1), (2, 2)) == counts((1, 1), (2, 1), (2, 2))


def test_the_number_of_counted_positions_is_bounded():
    assert len(counts((10_000, 10_000)).reached) < 100


def test_tree_acceptance_is_counted_by_node():
    """The first and the third-likeliest token of these blocks are accepted."""
    blocks = Chances()
    for _ in range(200):
        blocks = blocks.after(requested=3, drafted=3, accepted=(0, 2))
    first, second, third = [chance for chance, _, _ in blocks.expectations_of(blocks, 3)]
    assert min(first, third) > 0.9 > 0.1 > second
