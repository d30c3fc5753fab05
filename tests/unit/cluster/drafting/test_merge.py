"""A merged tree contains both methods' candidates, by decreasing probability and within the budget."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.drafting.requests import Proposal
from cluster.drafting.trees import TokenPath, combined, likeliest_of, merged, tree_of
from protos.draft_tree import NO_TREE, DraftTree


def a_proposal(chances: dict[TokenPath, float], confidence: float | None = None, **changes: float) -> Proposal:
    paths = likeliest_of(chances, len(chances), 0.0)
    falling = tuple([chance for _, chance in paths])
    return Proposal("s", 3, 77, tree_of(paths), (9,), confidence=confidence, chances=falling, **changes)


COPIED = a_proposal({(1,): 0.6, (1, 2): 0.54, (1, 2, 3): 0.5})
THOUGHT = a_proposal({(4,): 0.3, (4, 5): 0.2, (1,): 0.1}, confidence=0.3)


def test_the_likeliest_candidates_of_both_are_in_one_tree():
    found = merged(COPIED, THOUGHT, 4, 0.0)
    assert found.tree == DraftTree((1, 2, 3, 4), (-1, 0, 1, -1))
    assert (found.session, found.base_len, found.prefix_hash, found.outcome) == ("s", 3, 77, (9,))


def test_a_token_proposed_by_both_counts_once_with_a_higher_probability():
    one = a_proposal({(1,): 0.5, (1, 2): 0.25})
    other = a_proposal({(1,): 0.4, (1, 3): 0.1})
    found = merged(one, other, 8, 0.0)
    assert found.tree == DraftTree((1, 2, 3), (-1, 0, 0))
    assert found.chances == pytest.approx((0.7, 0.35, 0.175)), "what follows it is reached as often as it stands"


def test_merged_probabilities_at_one_position_add_up_to_at_most_one():
    chances = combined({(1,): 0.9}, {(2,): 0.6, (1,): 0.2})
    assert sum(chances.values()) == pytest.approx(1.0)
    assert chances[1,] / chances[2,] == pytest.approx((1 - 0.1 * 0.8) / 0.6)


@pytest.mark.parametrize("most", range(1, 6))
def test_the_first_nodes_of_a_merged_tree_are_the_best_smaller_tree(most):
    assert merged(COPIED, THOUGHT, most, 0.0).tree == merged(COPIED, THOUGHT, 6, 0.0).tree.first(most)


def test_nodes_below_the_least_chance_are_left_out():
    assert merged(COPIED, THOUGHT, 6, 0.4).tokens == (1, 2, 3)


def test_an_empty_block_leaves_the_other_unchanged():
    nothing = Proposal("s", 3, 77, NO_TREE, (9,))
    assert merged(nothing, THOUGHT, 4, 0.0) is THOUGHT
    assert merged(COPIED, nothing, 4, 0.0) is COPIED


def test_an_outcome_has_the_higher_of_both_probabilities():
    assert merged(a_proposal({(1,): 0.6}, chance=0.2), a_proposal({(1,): 0.5}, chance=0.7), 4, 0.0).chance == 0.7


def test_confidence_is_that_of_the_methods_own_first_token():
    assert merged(COPIED, THOUGHT, 4, 0.0).confidence is None
    assert merged(COPIED, a_proposal({(1,): 0.3}, confidence=0.3), 4, 0.0).confidence == 0.3


SHARES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0.01, 1.0)), min_size=1, max_size=8)


def drawn(shares: list[tuple[int, int, float]]) -> Proposal:
    chances: dict[TokenPath, float] = {}
    for first, second, share in shares:
        reached = chances.setdefault((first,), share)
        chances[first, second] = reached * share
    return a_proposal(chances)


@given(SHARES, SHARES, st.integers(1, 8), st.floats(0.0, 0.5))
def test_merged_trees_are_ordered_by_probability_and_bounded(one, other, most, least):
    found = merged(drawn(one), drawn(other), most, least)
    assert 1 <= len(found.tokens) <= most
    assert all(earlier >= later for earlier, later in pairwise(found.chances))
    assert all(parent < node for node, parent in enumerate(found.tree.parents))
    assert all(chance >= least for chance in found.chances[1:])
    assert len(set(zip(found.tokens, found.tree.parents, strict=True))) == len(found.tokens)
