"""What a method is told of sessions before a pass, and the texts that come of it."""

from cluster.drafting.requests import SessionTexts, SessionUpdates, UpdateCollector
from tests.unit.cluster.samples import an_open


def test_news_are_taken_once_and_tokens_of_several_verdicts_together() -> None:
    news = UpdateCollector()
    request = an_open("s", tokens=(1, 2))
    news.opened(request)
    news.committed("s", (3, 4))
    news.committed("s", (5,))
    assert news.take() == SessionUpdates(opened=(request,), committed=(("s", (3, 4, 5)),))
    assert news.take() == SessionUpdates()


def test_of_a_session_that_is_over_nothing_else_is_told() -> None:
    """A method that were told to open it would keep it for ever."""
    news = UpdateCollector()
    news.opened(an_open("s"))
    news.committed("s", (3,))
    news.closed("s")
    assert news.has_closed
    assert news.take() == SessionUpdates(closed=("s",))
    assert not news.has_closed


def test_a_session_that_is_replaced_is_closed_and_opened_with_its_new_text() -> None:
    news = UpdateCollector()
    news.opened(an_open("s", tokens=(1, 2)))
    news.closed("s")
    again = an_open("s", tokens=(1, 7), attempt=2)
    news.opened(again)
    news.committed("s", (8,))
    assert news.take() == SessionUpdates(("s",), (again,), (("s", (8,)),))


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
