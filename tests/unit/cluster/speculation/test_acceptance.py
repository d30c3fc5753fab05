"""Tests acceptance estimates from earlier blocks, and acceptance counts."""

from collections import Counter

import pytest

from cluster.speculation.estimators import AcceptanceCounts, DraftValue, NodeRates, chances_at


def rates_after(
    count: int, drafted: int, accepted: range | tuple[int, ...], rates: NodeRates | None = None
) -> NodeRates:
    rates = rates or NodeRates()
    for _ in range(count):
        rates.block_verified(drafted, accepted)
    return rates


def test_acceptance_is_learnt_by_node_from_few_blocks():
    unknown = NodeRates().accepted
    assert 1 > unknown[0] > unknown[1] > unknown[2] > 0
    first, second, *_ = rates_after(8, 2, range(1)).accepted
    assert first > 0.7
    assert second < 0.15


def test_tree_acceptance_is_counted_by_node():
    """The first and the third-likeliest token of these blocks are accepted."""
    first, second, third, *_ = rates_after(200, 3, (0, 2)).accepted
    assert min(first, third) > 0.9 > 0.1 > second


def test_the_node_after_a_good_block_is_expected_to_be_good_too():
    """Otherwise lengths would never grow beyond the first requests."""
    assert rates_after(100, 1, range(1)).accepted[1] > 0.8
    assert rates_after(100, 4, range(4)).accepted[4] > 0.8


def test_nodes_without_drafts_for_long_are_tried_again():
    """Otherwise blocks that became short once would stay short."""
    rates = rates_after(100, 3, range(1))
    pessimistic = rates.accepted[1]
    assert rates_after(2000, 1, range(1), rates).accepted[1] > 0.5 > pessimistic


def test_a_sessions_own_acceptance_raises_or_lowers_its_value():
    good, bad = DraftValue(), DraftValue()
    for _ in range(60):
        good.update(accepted=2, expected=sum(chances_at(good.level, (0.5, 0.25))))
        bad.update(accepted=0, expected=sum(chances_at(bad.level, (0.5, 0.25))))
    assert chances_at(good.level, (0.5,))[0] > 0.8
    assert chances_at(bad.level, (0.5,))[0] < 0.2
    assert chances_at(0, (0.5, 0.25)) == [0.5, 0.25]


def test_a_session_forgets_slowly():
    """A session without drafts thus tries them again."""
    drafts = DraftValue(-2.0)
    for _ in range(10):
        drafts.round_ended(0, is_missed=False, has_hit=False)
    assert drafts.log_odds < -1
    for _ in range(300):
        drafts.round_ended(0, is_missed=False, has_hit=False)
    assert drafts.level == 0


def test_rounds_without_a_block_are_counted_until_one_arrives():
    drafts = DraftValue()
    for _ in range(3):
        drafts.round_ended(0, is_missed=True, has_hit=False)
    assert drafts.missed == 3
    drafts.round_ended(0, is_missed=True, has_hit=True)
    assert drafts.missed == 0, "the next one has already arrived"


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
