"""Session updates that a method receives before a pass, and the resulting texts."""

from cluster.drafting.requests import SessionTexts, SessionUpdates, UpdateCollector
from tests.unit.cluster.samples import an_open


def test_news_are_taken_once_and_tokens_of_several_verdicts_together() -> None:
    updates = UpdateCollector()
    request = an_open("s", tokens=(1, 2))
    updates.opened(request)
    updates.committed("s", (3, 4))
    updates.committed("s", (5,))
    assert updates.take() == SessionUpdates(opened=(request,), committed=(("s", (3, 4, 5)),))
    assert updates.take() == SessionUpdates()


def test_of_a_session_that_is_over_nothing_else_is_told() -> None:
    """A method that were told to open it would keep it for ever."""
    updates = UpdateCollector()
    updates.opened(an_open("s"))
    updates.committed("s", (3,))
    updates.closed("s")
    assert updates.has_closed
    assert updates.take() == SessionUpdates(closed=("s",))
    assert not updates.has_closed


def test_a_session_that_is_replaced_is_closed_and_opened_with_its_new_text() -> None:
    updates = UpdateCollector()
    updates.opened(an_open("s", tokens=(1, 2)))
    updates.closed("s")
    again = an_open("s", tokens=(1, 7), attempt=2)
    updates.opened(again)
    updates.committed("s", (8,))
    assert updates.take() == SessionUpdates(("s",), (again,), (("s", (8,)),))


def test_a_text_grows_by_what_is_committed_until_it_is_closed() -> None:
    texts = SessionTexts()
    texts.open(an_open("s", tokens=(1, 2)))
    texts.committed("s", (3,))
    assert texts["s"].tokens == [1, 2, 3]
    texts.open(an_open("s", tokens=(1, 9)))
    assert texts["s"].tokens == [1, 9]
    texts.close(["s", "unknown"])
    texts.open(an_open("s", tokens=(4,)))
    assert texts["s"].tokens == [4]
