"""Prompt lookup: the continuation of the latest earlier occurrence of the longest suffix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.methods.prompt_lookup import PromptLookup, look_up
from cluster.wants import Proposal, Want
from tests.unit.cluster.samples import an_open


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


def test_a_proposal_answers_its_want_with_a_point_mass():
    want = Want(an_open(), (1, 2, 3, 1, 2), prefix_hash=77, max_tokens=1)
    assert PromptLookup(3, 2).propose([want], lambda: False) == [Proposal("s", 5, 77, (3,), None)]


def test_nothing_is_looked_up_ahead():
    """With the verdict it takes no time, and without it may be for nothing."""
    want = Want(an_open(), (1, 2, 3, 1, 2), prefix_hash=77, max_tokens=1, unverified=(3,))
    assert PromptLookup(3, 2).propose([want], lambda: False) == []
