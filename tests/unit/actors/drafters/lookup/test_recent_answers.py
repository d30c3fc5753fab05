"""Recent answers: each salt finds its own alone, and all are bounded together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.drafters.lookup.suffix import NO_MATCH, RecentAnswers, SuffixIndex

TEXTS = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 2), max_size=15)), min_size=1, max_size=8
)


def test_two_salts_share_nothing_and_one_salt_does():
    answers = RecentAnswers(2, 100)
    answers.add("a", [1, 2, 3])
    assert answers.find("a", [9, 1, 2], 4).following.keys() == {3}
    assert answers.find("b", [9, 1, 2], 4) == NO_MATCH
    answers.add("b", [1, 2, 4])
    assert answers.find("a", [9, 1, 2], 4).following.keys() == {3}
    assert answers.find("b", [9, 1, 2], 4).following.keys() == {4}


@given(TEXTS, st.integers(0, 30))
def test_the_oldest_of_all_are_forgotten_without_a_trace(texts, most):
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
def test_where_nothing_is_to_be_remembered_nothing_is_kept(texts):
    answers = RecentAnswers(2, 0)
    for _ in range(texts):
        answers.add("a", [1, 2, 3])
    assert (answers._indexes, len(answers._salts)) == ({}, 0)
