"""Predictions for a position are reported once, when its token is committed."""

from cluster.drafting.lookahead import PendingPositions


def test_a_position_is_decided_once():
    places: PendingPositions[str] = PendingPositions()
    places.note("s", (2, ()), "first")
    places.note("s", (2, (7,)), "after 7")
    places.note("s", (2, (7, 8)), "after 7 and 8")
    places.note("s", (2, (9,)), "after 9")
    assert places.resolve("s", (1, 2)) == []
    assert places.resolve("s", (1, 2, 7, 5)) == [("first", 7), ("after 7", 5)]
    assert places.resolve("s", (1, 2, 7, 5, 8, 9, 9)) == [], "passed by"


def test_a_position_waits_until_the_text_reaches_it():
    places: PendingPositions[str] = PendingPositions()
    places.note("s", (2, (7, 8)), "there")
    assert places.resolve("s", (1, 2, 7)) == []
    assert places.resolve("s", (1, 2, 7, 8, 3)) == [("there", 3)]


def test_the_latest_candidates_count_and_closing_forgets_them():
    places: PendingPositions[str] = PendingPositions()
    places.note("s", (1, ()), "before")
    places.note("s", (1, ()), "later")
    places.note("t", (1, ()), "other")
    places.close("t")
    places.close("unknown")
    assert places.resolve("s", (1, 2)) == [("later", 2)]
    assert places.resolve("t", (1, 2)) == []
