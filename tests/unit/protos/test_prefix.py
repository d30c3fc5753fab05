"""Tests the rolling hash that identifies the prefix of blocks and verdicts."""

from hypothesis import assume, given
from hypothesis import strategies as st

from protos.prefix import Prefix, extend_hash

KEYS = st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@given(KEYS, TOKENS)
def test_every_prefix_hash_is_the_one_before_grown_by_a_token(key, tokens):
    prefix = Prefix(key, tokens)
    for length, token in enumerate(tokens):
        before = prefix.hash_at(length)
        after = prefix.hash_at(length + 1)
        assert before is not None
        assert after == extend_hash(before, token) < 2**64
    assert prefix.hash == prefix.hash_at(len(prefix))
    assert prefix.matches(len(prefix), prefix.hash)


@given(KEYS, TOKENS, TOKENS)
def test_the_hash_does_not_depend_on_how_tokens_were_added(key, first, second):
    """A verdict of five tokens and five verdicts of one must address the same history."""
    at_once = Prefix(key, first + second)
    in_parts = Prefix(key, first)
    for token in second:
        in_parts.append(token)
    assert at_once.hash == in_parts.hash
    assert at_once.tokens == in_parts.tokens


@given(KEYS, TOKENS, TOKENS)
def test_truncating_forgets_exactly_the_tail(key, first, second):
    prefix = Prefix(key, first + second)
    prefix.truncate(len(first))
    assert prefix.tokens == first
    assert prefix.hash == Prefix(key, first).hash
    assert prefix.hash_at(len(first) + 1) is None
    prefix.extend(second)
    assert prefix.hash == Prefix(key, first + second).hash


@given(KEYS, KEYS, TOKENS, TOKENS)
def test_key_tokens_and_length_all_change_the_hash(key, other_key, tokens, other_tokens):
    """Two different histories share a hash once in 2**64: none of these examples may."""
    assume(key != other_key)
    assume(tokens != other_tokens)
    assert Prefix(key, tokens).hash != Prefix(other_key, tokens).hash
    assert Prefix(key, tokens).hash != Prefix(key, other_tokens).hash


def test_a_permutation_and_a_trailing_zero_are_other_histories():
    """A sum, an exclusive-or, or a hash that starts at zero would confuse these histories."""
    assert Prefix(0, [1, 2]).hash != Prefix(0, [2, 1]).hash
    assert Prefix(0, [0]).hash != Prefix(0, [0, 0]).hash != Prefix(0).hash
    assert Prefix(0, [5, 5]).hash != Prefix(0).hash


def test_no_hash_matches_where_there_are_no_tokens():
    prefix = Prefix(1, [1, 2])
    assert not prefix.matches(3, prefix.hash)
    assert not prefix.matches(-1, prefix.hash)
    assert not prefix.matches(1, prefix.hash)
