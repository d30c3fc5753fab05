"""Tests the session updates that a method receives before a pass, and the resulting texts."""

from cluster.drafting.requests import SessionText, SessionUpdates
from tests.unit.cluster.samples import an_open


def test_updates_are_taken_once_with_the_tokens_of_all_verdicts() -> None:
    updates = SessionUpdates()
    request = an_open("s", tokens=(1, 2))
    updates.open(request)
    updates.commit("s", (3, 4))
    updates.commit("s", (5,))
    assert updates.take() == SessionUpdates(opened={"s": request}, committed={"s": [3, 4, 5]})
    assert updates.take() == SessionUpdates()


def test_a_closed_session_has_no_other_updates() -> None:
    """A method that opened a closed session would keep it forever."""
    updates = SessionUpdates()
    updates.open(an_open("s"))
    updates.commit("s", (3,))
    updates.close("s")
    assert updates.take() == SessionUpdates(closed={"s": None})
    assert not updates.closed


def test_a_session_that_is_replaced_is_closed_and_opened_with_its_new_text() -> None:
    updates = SessionUpdates()
    updates.open(an_open("s", tokens=(1, 2)))
    updates.close("s")
    again = an_open("s", tokens=(1, 7), attempt=2)
    updates.open(again)
    updates.commit("s", (8,))
    assert updates.take() == SessionUpdates({"s": None}, {"s": again}, {"s": [8]})


def test_taken_updates_do_not_change_later() -> None:
    updates = SessionUpdates()
    updates.commit("s", (3,))
    pending = updates.take()
    updates.commit("s", (4,))
    assert pending == SessionUpdates(committed={"s": [3]})


def test_a_text_begins_with_the_prompt_without_changing_the_request() -> None:
    request = an_open("s", tokens=(1, 2))
    text = SessionText.begin(request)
    text.tokens.append(3)
    assert (text.tokens, request.tokens) == ([1, 2, 3], (1, 2))
