"""Assignment tokens are valid only for their session, number and key."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cluster.trust import is_valid, issue

KEYS = st.binary(min_size=1, max_size=64)
NUMBERS = st.integers(0, 2**32 - 1)


@given(KEYS, st.text(), NUMBERS)
def test_a_token_is_valid_only_for_its_session_and_number(key, session, number):
    assert is_valid(issue(key, session, number), key, session)


@given(KEYS, KEYS, st.text(), st.text(), NUMBERS, NUMBERS)
def test_an_assignment_token_is_valid_for_nothing_else(key, other_key, session, other_session, number, other_number):
    token = issue(key, session, number)
    assert is_valid(token, other_key, session) == (other_key == key or other_key.rstrip(b"\0") == key.rstrip(b"\0"))
    assert is_valid(token, key, other_session) == (other_session == session)
    assert is_valid(replace(token, assignment=other_number), key, session) == (other_number == number)
