"""Tests suffix lookup: the index against a linear search, recent answers, and the method over both."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.drafters.lookup.suffix import NO_MATCH, EscapeRates, Match, RecentAnswers, SuffixIndex, SuffixLookup, longer
from cluster.config_sections import SuffixOptions
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Sampling, Shape
from tests.unit.actors.drafters.drafting import DRAWN, block_of, propose, wanted_block
from tests.unit.cluster.samples import an_open

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=15), min_size=1, max_size=6)
SALTED = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 2), max_size=15)), min_size=1, max_size=8
)

# ---------------------------------------------------------------- the index


def searched(texts: list[list[int]], end: list[int], shortest: int, longest: int) -> Match:
    """Reference search: returns every matching place of every text, latest first."""
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
def test_matches_equal_those_of_a_full_search(texts, end, shortest, more):
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
    both = longer(own, Match(3, other.occurrences))
    assert both.following == {4: own.occurrences, 5: other.occurrences}


def test_the_latest_of_equally_frequent_tokens_comes_first():
    index = SuffixIndex(1)
    index.add([7, 1, 7, 2, 7, 2, 7, 3, 7])
    assert list(index.find([7], 1).following) == [2, 3, 1]


def test_only_the_latest_occurrences_are_looked_at():
    index = SuffixIndex(1)
    index.add([9, 8] + [9, 7] * 5000 + [9])
    assert list(index.find([9], 1).following) == [7]


def test_only_occurrences_followed_by_the_token_remain():
    text = [1, 2, 3, 1, 2, 4, 5, 1, 2]
    index = SuffixIndex(2)
    index.add(text)
    match = index.find(text, 4)
    assert set(match.following) == {3, 4}
    assert match.after(4) == Match(match.length + 1, ((text, 6),))
    assert match.after(4).after(5) == Match(match.length + 2, ((text, 7),))
    assert match.after(9).occurrences == ()


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
    other = Match(8, match.occurrences)
    assert sum(rates.choices(other).chances) == pytest.approx(1 / 2), "longer matches are judged by themselves"


def test_rates_follow_what_changes():
    match = Match(2, (([1, 2, 5], 2),))
    rates = EscapeRates()
    for _ in range(5000):
        rates.learn(match, 5)
    for _ in range(1000):
        rates.learn(match, 6)
    assert sum(rates.choices(match).chances) < 0.05


# ---------------------------------------------------------------- recent answers


def test_answers_are_found_by_their_salt_only():
    answers = RecentAnswers(2, 100)
    answers.add("a", [1, 2, 3])
    assert answers.find("a", [9, 1, 2], 4).following.keys() == {3}
    assert answers.find("b", [9, 1, 2], 4) == NO_MATCH
    answers.add("b", [1, 2, 4])
    assert answers.find("a", [9, 1, 2], 4).following.keys() == {3}
    assert answers.find("b", [9, 1, 2], 4).following.keys() == {4}


@given(SALTED, st.integers(0, 30))
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
    for salt, text in texts:
        index = fresh.get(salt) or SuffixIndex(2)
        for end in range(len(text) + 1):
            assert answers.find(salt, text[:end], 4) == index.find(text[:end], 4)


@pytest.mark.parametrize("texts", [1, 100])
def test_a_size_of_zero_keeps_no_answers(texts):
    answers = RecentAnswers(2, 0)
    for _ in range(texts):
        answers.add("a", [1, 2, 3])
    assert pickle.dumps(answers) == pickle.dumps(RecentAnswers(2, 0)), "nor anything else"


# ---------------------------------------------------------------- the method


def a_method(remembered: int = 1000, shortest: int = 2) -> SuffixLookup:
    return SuffixLookup(SuffixOptions(max_ngram=4, min_ngram=shortest, remembered_tokens=remembered), clock=lambda: 0.0)


def answer(method: SuffixLookup, tokens: tuple[int, ...], **changes: Any) -> None:
    """Runs a session from its first token to its end."""
    method.open(an_open("before", tokens=(50,), **changes))
    method.committed("before", tokens)
    method.close(["before"])


def test_the_most_frequent_continuation_counts():
    assert block_of(a_method(), wanted_block((1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 1, 2))).tokens == (3, 1, 2)


def test_answers_that_have_ended_are_known_to_other_sessions():
    method = a_method()
    answer(method, (1, 2, 3, 4, 5))
    assert block_of(method, wanted_block((9, 1, 2))).tokens == (3, 4, 5)
    assert block_of(a_method(remembered=0), wanted_block((9, 1, 2))).tokens == ()


def test_answers_are_known_to_sessions_with_their_own_cache_salt_alone():
    method = a_method()
    answer(method, (1, 2, 3, 4, 5), cache_salt="key a")
    for salt, known in (("key a", (3, 4, 5)), ("key b", ()), ("", ())):
        assert block_of(method, wanted_block((9, 1, 2), cache_salt=salt)).tokens == known


def test_prompts_are_not_remembered_but_for_where_the_answer_begins():
    method = a_method()
    method.open(an_open("before", tokens=(20, 21, 22, 23, 1, 2)))
    method.committed("before", (3, 4))
    method.close(["before"])
    assert block_of(method, wanted_block((1, 2))).tokens == (3, 4)
    assert block_of(method, wanted_block((20, 21))).tokens == ()


def test_an_answer_drawn_by_rejection_sampling_is_not_remembered():
    """A repeated session could be decided by the same noise that produced the remembered tokens."""
    for sampling, acceptance, is_known in (
        (DRAWN, Acceptance.REJECTION, False),
        (Sampling(temperature=0.0), Acceptance.REJECTION, True),
        (DRAWN, Acceptance.COUPLED, True),
    ):
        method = a_method()
        answer(method, (1, 2, 3), sampling=sampling, acceptance=acceptance)
        assert (block_of(method, wanted_block((1, 2))).tokens == (3,)) == is_known


def test_a_session_s_text_is_found_in_as_it_grows():
    method = a_method()
    method.open(an_open(tokens=(1, 2)))
    method.committed("s", (3, 1, 2))
    (proposal,) = method.draft([wanted_block((1, 2, 3, 1, 2)).request])
    assert proposal.tokens == (3, 1, 2)


TWICE = (1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 4, 9, 1, 2)


def test_a_tree_ranks_continuations_by_frequency():
    proposal = block_of(a_method(), wanted_block(TWICE, max_tokens=5, shape=Shape.TREE))
    assert proposal.tree.main_path[0] == 4
    assert set(proposal.tree.children(-1)) == {4, 3}
    assert set(proposal.tree.children(0)) == {9, 8}
    assert len(proposal.tree) == 5


def test_a_chain_has_the_most_frequent_tokens():
    for changes in (
        {"shape": Shape.CHAIN},
        {"shape": Shape.TREE, "sampling": DRAWN, "acceptance": Acceptance.REJECTION},
    ):
        proposal = block_of(a_method(), wanted_block(TWICE, **changes))
        assert proposal.tree == DraftTree.chain((4, 9, 1)), "point masses, without probabilities"


def test_unlikely_tokens_are_not_sent_except_with_rejection_sampling():
    """Initially, a new token has half of the probability; the token seen twice has two thirds of the rest."""
    for least, tokens in ((0.3, (4,)), (0.16, (4, 3)), (0.35, ())):
        assert block_of(a_method(), wanted_block(TWICE, shape=Shape.TREE, least_chance=least)).tokens == tokens
    drawn = {"sampling": DRAWN, "acceptance": Acceptance.REJECTION}
    assert block_of(a_method(), wanted_block(TWICE, least_chance=0.9, **drawn)).tokens == (4, 9, 1)


def test_chances_are_learned_from_what_was_decided():
    method = a_method()
    method.open(an_open(tokens=(1, 2, 3)))
    for _ in range(20):
        method.committed("s", (1, 2, 3))
    (proposal,) = method.draft([wanted_block((1, 2, 3) * 21, shape=Shape.TREE, least_chance=0.7).request])
    assert proposal.tokens == (1, 2, 3), "what always went on as before is likely to do so again"


def test_lookahead_covers_alternatives_to_the_block():
    outcomes = {guess.outcome for guess in propose(a_method(), [wanted_block(TWICE).under((4,), max_tokens=2)])}
    assert {(3,), (4, 9), (4, 8)} <= outcomes


def test_closing_a_session_twice_or_an_unknown_one_is_nothing():
    method = a_method()
    answer(method, (1, 2, 3))
    method.close(["before", "other"])
    assert block_of(method, wanted_block((1, 2))).tokens == (3,)
