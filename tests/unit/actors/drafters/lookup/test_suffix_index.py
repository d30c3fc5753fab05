"""Earlier occurrences of a text's end, against a plain search; reliability of matches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.drafters.lookup.suffix import LOOKED_AT, NO_MATCH, EscapeRates, Match, SuffixIndex, longer

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=15), min_size=1, max_size=6)


def searched(texts: list[list[int]], end: list[int], shortest: int, longest: int) -> Match:
    """The specification: every place of every text, the latest first."""
    found: dict[int, list[tuple[list[int], int]]] = {}
    for text in reversed(texts):
        for at in range(len(text) - 1, 0, -1):
            size = 0
            while size < min(at, len(end), longest) and text[at - 1 - size] == end[-1 - size]:
                size += 1
            found.setdefault(size, []).append((text, at))
    best = max(found, default=0)
    return Match(best, tuple(found[best])) if best >= shortest else NO_MATCH


@given(TEXTS, st.lists(st.integers(0, 2), max_size=8), st.integers(1, 3), st.integers(0, 3))
def test_it_finds_what_a_search_of_all_texts_finds(texts, end, shortest, more):
    index = SuffixIndex(shortest)
    for text in texts:
        index.add(text)
    found = index.find(end, shortest + more)
    expected = searched(texts, end, shortest, shortest + more)
    assert found == expected
    for token, places in found.following.items():
        assert all(text[at] == token for text, at in places)


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 30), st.integers(1, 3))
def test_a_growing_text_is_found_in_as_if_it_had_been_whole(text, known, shortest):
    grown = text[:known]
    index = SuffixIndex(shortest)
    index.add(grown)
    grown += text[known:]
    index.grow(min(known, len(text)))
    assert index.find(text, 5) == searched([text], text, shortest, 5)


def test_the_longer_match_counts_and_equal_ones_count_together():
    own = Match(3, (([1, 2, 3, 4], 3),))
    other = Match(2, (([2, 3, 5], 2),))
    assert longer(own, other) is own
    assert longer(other, own) is own
    both = longer(own, Match(3, other.places))
    assert both.following == {4: own.places, 5: other.places}


def test_of_equally_frequent_tokens_the_latest_comes_first():
    index = SuffixIndex(1)
    index.add([7, 1, 7, 2, 7, 2, 7, 3, 7])
    assert list(index.find([7], 1).following) == [2, 3, 1]


def test_only_the_latest_occurrences_are_looked_at():
    index = SuffixIndex(1)
    index.add([9, 8] + [9, 7] * LOOKED_AT + [9])
    assert list(index.find([9], 1).following) == [7]


def test_after_a_token_only_the_places_that_have_it_stay():
    text = [1, 2, 3, 1, 2, 4, 5, 1, 2]
    index = SuffixIndex(2)
    index.add(text)
    match = index.find(text, 4)
    assert set(match.following) == {3, 4}
    assert match.after(4) == Match(match.length + 1, ((text, 6),))
    assert match.after(4).after(5) == Match(match.length + 2, ((text, 7),))
    assert match.after(9).places == ()


def test_chances_are_shares_of_how_often_anything_known_follows():
    match = Match(2, tuple(([1, 2, token], 2) for token in (5, 5, 6, 5)))
    rates = EscapeRates()
    assert rates.choices(match).tokens == (5, 6)
    assert rates.choices(match).chances == pytest.approx((3 / 8, 1 / 8)), (
        "at first, half of the chance is anything else's"
    )
    for _ in range(8):
        rates.learn(match, 6)
    assert sum(rates.choices(match).chances) == pytest.approx(9 / 10)
    for _ in range(10):
        rates.learn(match, 99)
    assert sum(rates.choices(match).chances) == pytest.approx(9 / 20)
    other = Match(8, match.places)
    assert sum(rates.choices(other).chances) == pytest.approx(1 / 2), "longer matches are judged by themselves"


def test_rates_follow_what_changes():
    match = Match(2, (([1, 2, 5], 2),))
    rates = EscapeRates()
    for _ in range(5000):
        rates.learn(match, 5)
    for _ in range(1000):
        rates.learn(match, 6)
    assert sum(rates.choices(match).chances) < 0.05
