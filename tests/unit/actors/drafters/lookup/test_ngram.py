"""N-gram drafts: the continuation of the latest earlier occurrence of the longest suffix."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.drafters.lookup.ngram import NgramDraft, look_up
from cluster.drafting.requests import Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, DraftRequest, Sampling, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting_requests import Want, propose
from tests.unit.cluster.samples import KEY, an_open


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((1, 2, 3, 4, 9, 1, 2), (3, 4, 9)),
        ((1, 2, 3, 1, 2, 4, 1, 2), (4, 1, 2)),  # the latest occurrence
        ((5, 1, 2, 7, 8, 1, 2, 9, 5, 1, 2), (7, 8, 1)),  # the longest suffix, though a shorter one is later
        ((1, 1, 1, 1), (1,)),  # an occurrence may overlap the suffix
        ((1, 2, 3, 4), ()),
        ((2, 3, 2), ()),  # one token is too short
        ((1,), ()),
    ],
    ids=["once", "latest", "longest", "overlap", "none", "too short", "one token"],
)
def test_look_up(tokens, expected):
    assert look_up(tokens, max_tokens=3, longest=3, shortest=2) == expected


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
def test_what_is_found_stands_in_the_text_after_the_same_suffix(tokens, max_tokens, shortest, more):
    found = look_up(tokens, max_tokens, shortest + more, shortest)
    assert len(found) <= max_tokens
    if found:
        needle = [*tokens[-shortest:], *found]
        assert any(tokens[i : i + len(needle)] == needle for i in range(len(tokens)))


def test_a_proposal_answers_its_request_with_a_point_mass():
    want = Want(an_open(), (1, 2, 3, 1, 2), prefix_hash=77, max_tokens=1)
    assert propose(NgramDraft(3, 2), [want]) == [Proposal("s", 5, 77, DraftTree.chain((3,)))]


def ahead(tokens: tuple[int, ...], unverified: tuple[int, ...], max_tokens: int = 2, **changes: Any) -> list[Proposal]:
    want = Want(an_open(**changes), tokens, Prefix(KEY, tokens).hash, max_tokens, DraftTree.chain(unverified))
    return propose(NgramDraft(3, 2), [want])


@pytest.mark.parametrize("unverified", [(3, 4), (3,), ()], ids=["block", "part of it", "plain step"])
def test_ahead_the_text_is_expected_to_go_on_as_it_did_before(unverified):
    tokens = (1, 2, 3, 4, 5, 6, 7, 1, 2)
    before = (3, 4, 5, 6, 7)
    (guess,) = ahead(tokens, unverified)
    size = len(unverified) + 1
    whole = (*tokens, *before[:size])
    assert guess.outcome == before[:size]
    assert guess.tokens == before[size : size + 2]
    assert (guess.base_len, guess.prefix_hash) == (len(whole), Prefix(KEY, whole).hash)
    assert guess.tokens == look_up(whole, 2, 3, 2), "as if the verdict were in: a function of the prefix alone"


def test_where_the_text_has_nothing_ahead_a_target_that_does_not_wait_is_told_so():
    """Or it would take the drafter for silent; one that verifies a block has heard of it."""
    (nothing,) = ahead((1, 2, 3, 4), ())
    assert (nothing.base_len, nothing.tokens, nothing.outcome) == (4, (), ())
    assert ahead((1, 2, 3, 4), (9,)) == []


def test_nothing_is_looked_up_past_the_end():
    tokens = (1, 2, 3, 4, 5, 1, 2)
    assert ahead(tokens, (3,), stop_ids=(4,)) == []
    assert ahead(tokens, (3,), max_len=10) == []
    (guess,) = ahead(tokens, (3,), max_len=11)
    assert guess.tokens == (5,)


DIVIDED = (1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 6, 9, 1, 2)  # 1 2 was followed by 3 4, 3 5 and 6
DRAWN = Sampling(temperature=1.0)


def a_tree(tokens: tuple[int, ...], most: int, least_chance: float = 0.0, **changes: Any) -> Proposal:
    want = Want(an_open(**changes), tokens, 77, most, least_chance=least_chance, shape=Shape.TREE)
    (found,) = propose(NgramDraft(3, 2), [want])
    return found


def test_several_continuations_make_a_tree_whose_chances_fall():
    found = a_tree(DIVIDED, 30)
    assert set(found.tree.children(-1)) == {3, 6}
    assert set(found.tree.children(found.tokens.index(3))) == {4, 5}
    assert len(found.chances) == len(found.tokens) == 30
    assert all(earlier >= later for earlier, later in pairwise(found.chances))
    assert found.chances[0] < 0.9, "nothing is sure"


@pytest.mark.parametrize("most", range(1, 6))
def test_the_budget_holds_and_first_nodes_are_the_best_smaller_tree(most):
    assert a_tree(DIVIDED, most).tree == a_tree(DIVIDED, 6).tree.first(most)


def test_shorter_suffixes_fill_what_the_longest_leaves():
    tokens = (5, 1, 2, 7, 8, 1, 2, 9, 5, 1, 2)
    found = a_tree(tokens, 4)
    assert found.tree.main_path[0] == 7, "after 5 1 2"
    assert 9 in found.tree.children(-1), "after 1 2"


def test_what_is_too_unlikely_is_not_sent():
    least = a_tree(DIVIDED, 5).chances[1]
    assert len(a_tree(DIVIDED, 5, least).tokens) == 2
    assert a_tree(DIVIDED, 5, least_chance=0.95).tree == NO_TREE


def test_under_ratio_a_lookup_is_the_same_one_chain_whatever_is_asked_for():
    for shape in Shape:
        want = Want(
            an_open(acceptance=Acceptance.REJECTION, sampling=DRAWN), DIVIDED, 77, 4, least_chance=0.9, shape=shape
        )
        (found,) = propose(NgramDraft(3, 2), [want])
        assert found.tree == DraftTree.chain(look_up(DIVIDED, 4, 3, 2))
    tree = DraftTree.chain((6, 9))
    want = replace(want, unverified=tree, prefix_hash=Prefix(KEY, DIVIDED).hash)
    assert [guess.outcome for guess in propose(NgramDraft(3, 2), [want])] == [(6, 9, 1)]


def test_a_chain_is_the_latest_continuation_with_chances():
    want = Want(an_open(), DIVIDED, 77, 3)
    (found,) = propose(NgramDraft(3, 2), [want])
    assert found.tree == DraftTree.chain((6, 9, 1))
    assert 0 < found.chances[2] <= found.chances[0] < 0.9


def test_a_lookup_that_is_often_wrong_says_so():
    method = NgramDraft(3, 2)
    method.open(an_open(tokens=DIVIDED, max_len=1000))
    length = len(DIVIDED)
    first = []
    for new in range(20, 60):
        (found,) = method.draft([DraftRequest("s", 1, length, 77, max_tokens=4, shape=Shape.TREE)])
        first.append(found.chances[0])
        method.committed("s", (new, 1, 2))
        length += 3
    assert first[-1] < first[0] / 2


def ahead_of(tokens: tuple[int, ...], tree: DraftTree, chances: tuple[float, ...] = ()) -> set[tuple[int, ...]]:
    want = Want(an_open(), tokens, Prefix(KEY, tokens).hash, 3, tree, shape=Shape.TREE)
    method = NgramDraft(3, 2)
    method.open(replace(want.open, tokens=tokens))
    found = method.draft_ahead([replace(want.ahead, chances=chances)], lambda: False)
    assert all(proposal.tokens for proposal in found)
    assert [proposal.chance for proposal in found] == sorted((p.chance for p in found), reverse=True)
    return {proposal.outcome for proposal in found}


def test_ahead_there_is_a_block_for_each_continuation_that_the_text_knows():
    assert {(3,), (6,)} <= ahead_of(DIVIDED, NO_TREE)
    assert {(6, 9, 1), (3,)} <= ahead_of(DIVIDED, DraftTree.chain((6, 9)))


def test_ahead_nothing_is_drafted_for_a_verdict_that_cannot_come():
    tree = DraftTree((3, 6, 4), (-1, -1, 0))
    outcomes = ahead_of(DIVIDED, tree)
    assert not outcomes & {(3,), (6,), (3, 4)}, "a draft token is accepted, and another comes after it"
    assert {(3, 5), (6, 9), (3, 4, 9)} <= outcomes


def test_ahead_tokens_of_another_method_are_as_likely_as_it_says():
    outcomes = ahead_of(DIVIDED, DraftTree.chain((8, 1, 2)), chances=(0.6, 0.5, 0.5))
    assert any(outcome[:3] == (8, 1, 2) for outcome in outcomes)
    assert not any(outcome[:3] == (8, 1, 2) for outcome in ahead_of(DIVIDED, DraftTree.chain((8, 1, 2))))
