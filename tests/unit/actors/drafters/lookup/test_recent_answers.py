"""Recent answers: separated by salt, with one bound on their total size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.drafters.lookup.suffix import NO_MATCH, RecentAnswers, SuffixIndex

TEXTS = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 2), max_size=15)), min_size=1, max_size=8
)


def test_answers_are_found_by_their_salt_only():
    answers = RecentAnswers(2, 100)
    answers.add("a", [1, 2, 3])
    assert answers.find("a", [9, 1, 2], 4).following.keys() == {3}
    assert answers.find("b", [9, 1, 2], 4) == NO_MATCH
    answers.add("b", [1, 2, 4])
    assert answers.find("a", [9, 1, 2], 4).following.keys() == {3}
    assert answers.find("b", [9, 1, 2], 4).following.keys() == {4}


@given(TEXTS, st.integers(0, 30))
def test_oldest_answers_are_dropped_completely(texts, most):
    answers = RecentAnswers(2, most)
    for salt, text in texts:
        answers.add(salt, text)
    kept: list[tuple[str, list[int]]] = []
    for salt, text in reversed(texts):
        part = text[max(0, len(text) - most) :]
        if sum(len(text) for _, text in kept) + len(part) > most:
            break
        kept.insert(0, (salt, part))
    fresh: dict[str, SuffixIndex] = {}
    for salt, text in kept:
        if text:
            fresh.setdefault(salt, SuffixIndex(2)).add(text)
    assert answers.tokens == sum(index.tokens for index in fresh.values()) <= most
    assert {salt: index._texts for salt, index in answers._indexes.items()} == {
        salt: index._texts for salt, index in fresh.items()
    }
    for salt, index in fresh.items():
        found = {key: places for key, places in answers._indexes[salt]._places.items() if places}
        assert found == {key: places for key, places in index._places.items() if places}


@pytest.mark.parametrize("texts", [1, 100])
def test_a_size_of_zero_keeps_no_answers(texts):
    answers = RecentAnswers(2, 0)
    for _ in range(texts):
        answers.add("a", [1, 2, 3])
    assert (answers._indexes, len(answers._salts)) == ({}, 0)
