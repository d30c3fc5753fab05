"""Prompt lookup: the continuation of the latest earlier occurrence of the longest suffix."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.methods.prompt_lookup import PromptLookup, look_up
from cluster.drafting.requests import Proposal
from protos.draft_tree import DraftTree
from protos.prefix import Prefix
from tests.unit.actors.methods.asking import Want, propose
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
    assert propose(PromptLookup(3, 2), [want]) == [Proposal("s", 5, 77, DraftTree.chain((3,)))]


def ahead(tokens: tuple[int, ...], unverified: tuple[int, ...], max_tokens: int = 2, **changes: Any) -> list[Proposal]:
    want = Want(an_open(**changes), tokens, Prefix(KEY, tokens).hash, max_tokens, DraftTree.chain(unverified))
    return propose(PromptLookup(3, 2), [want])


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
