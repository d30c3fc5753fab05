"""Earlier occurrences of a text's end, and the tokens that followed them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.drafters.lookup.ngram import MOST, Continuations, GrowingText, Occurrences, occurrences


def found_in(*tokens: int, longest: int = 3, shortest: int = 2) -> Occurrences:
    return occurrences(np.array(tokens, dtype=np.int32), longest, shortest)


def test_continuations_of_longer_suffixes_weigh_more():
    shares = found_in(5, 1, 2, 7, 8, 1, 2, 9, 5, 1, 2).shares()
    assert list(shares) == [7, 9], "after 5 1 2, and after 1 2 alone, though later"
    assert sum(shares.values()) == pytest.approx(1.0)


def test_frequent_and_recent_continuations_weigh_more():
    often = found_in(1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, longest=2).shares()
    assert list(often) == [3, 4]
    late = found_in(1, 2, 3, 1, 2, 4, 1, 2, longest=2).shares()
    assert list(late) == [4, 3]


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2), (1, 2, 3, 4), (2, 3, 2)])
def test_a_text_without_repetition_has_no_occurrences(tokens):
    assert len(found_in(*tokens)) == 0


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4), st.integers(0, 3))
def test_occurrences_match_a_naive_search(tokens, shortest, more):
    longest = shortest + more
    plain = {}
    for end in range(1, len(tokens)):
        same = 0
        while same < min(longest, end) and tokens[end - 1 - same] == tokens[-1 - same]:
            same += 1
        if same >= shortest:
            plain[end] = same
    best = sorted(plain.items(), key=lambda place: (place[1], place[0]))[-MOST:]
    found = found_in(*tokens, longest=longest, shortest=shortest)
    assert dict(zip(found.ends.tolist(), found.sizes.tolist(), strict=True)) == dict(best)


def test_longer_paths_reuse_occurrences_or_search_again():
    text = GrowingText((1, 2, 3, 4, 1, 2, 5, 6, 1, 2))
    known = Continuations(text, (), longest=3, shortest=2)
    assert set(known.at(()).shares()) == {3, 5}
    assert set(known.at((3,)).shares()) == {4}
    assert set(known.at((5,)).shares()) == {6}
    assert known.at((3,)).size == 3, "the drafted token lengthens the match"
    assert len(known.at((7,))) == 0
    assert set(known.at((7, 1, 2)).shares()) == {3, 5, 7}, "drafted tokens count as text"


def test_continuations_come_after_the_outcome():
    known = Continuations(GrowingText((1, 2, 3, 4, 9)), (1, 2), longest=3, shortest=2)
    assert set(known.at(()).shares()) == {3}


def test_a_text_grows_and_earlier_views_stay():
    text = GrowingText((1, 2))
    before = text.tokens
    text.extend((3,))
    text.extend(range(4, 100))
    assert before.tolist() == [1, 2]
    assert text.tokens.tolist() == list(range(1, 100))
    assert text.followed_by((7,)).tolist() == [*range(1, 100), 7]
