"""N-gram drafts: the continuation of the latest earlier occurrence of the longest suffix, and its probability."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.drafters.lookup.ngram import (
    Continuations,
    GrowingText,
    NgramCalibration,
    NgramDraft,
    Occurrences,
    look_up,
    occurrences,
)
from cluster.drafting.requests import Proposal
from cluster.drafting.trees import Choices
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import DraftRequest, Shape
from tests.unit.actors.drafters.drafting import DRAWN, REJECTION, block_of, propose, wanted_block
from tests.unit.actors.drafters.lookup.test_lookups import DIVIDED
from tests.unit.cluster.samples import an_open

# ---------------------------------------------------------------- chains


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((1, 2, 3, 1, 2, 4, 1, 2), (4, 1, 2)), ((1, 1, 1, 1), (1,))],
    ids=["latest", "overlap with the suffix"],
)
def test_the_latest_of_equal_suffixes_counts(tokens, expected):
    assert look_up(tokens, max_tokens=3, longest=3, shortest=2) == expected


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
def test_matches_follow_the_same_suffix_in_the_text(tokens, max_tokens, shortest, more):
    found = look_up(tokens, max_tokens, shortest + more, shortest)
    assert len(found) <= max_tokens
    if found:
        needle = [*tokens[-shortest:], *found]
        assert any(tokens[i : i + len(needle)] == needle for i in range(len(tokens)))


def test_with_rejection_sampling_a_chain_is_the_latest_continuation():
    want = wanted_block(DIVIDED, 4, acceptance=REJECTION, sampling=DRAWN)
    assert block_of(NgramDraft(3, 2), want).tokens == look_up(DIVIDED, 4, 3, 2) == (6, 9, 1, 2)
    assert [guess.outcome for guess in propose(NgramDraft(3, 2), [want.under((6, 9))])] == [(6, 9, 1)]


def test_probabilities_fall_along_a_chain():
    block = block_of(NgramDraft(3, 2), wanted_block(DIVIDED))
    assert block.tree == DraftTree.chain((6, 9, 1))
    assert 0 < block.chances[2] <= block.chances[0] < 0.9, "nothing is sure"


# ---------------------------------------------------------------- trees


def a_tree(tokens: tuple[int, ...], most: int, least_chance: float = 0.0) -> Proposal:
    return block_of(NgramDraft(3, 2), wanted_block(tokens, most, least_chance=least_chance, shape=Shape.TREE))


def test_a_tree_s_chances_fall_and_its_first_nodes_are_the_best_smaller_tree():
    whole = a_tree(DIVIDED, 30)
    assert set(whole.tree.children(whole.tokens.index(3))) == {4, 5}
    assert len(whole.chances) == len(whole.tokens) == 30
    assert all(earlier >= later for earlier, later in pairwise(whole.chances))
    assert whole.chances[0] < 0.9
    for most in range(1, 6):
        assert a_tree(DIVIDED, most).tree == whole.tree.first(most)


def test_shorter_suffixes_fill_what_the_longest_leaves():
    tokens = (5, 1, 2, 7, 8, 1, 2, 9, 5, 1, 2)
    found = a_tree(tokens, 4)
    assert found.tree.main_path[0] == 7, "after 5 1 2"
    assert 9 in found.tree.children(-1), "after 1 2"


def test_tokens_below_the_minimum_probability_are_not_sent():
    least = a_tree(DIVIDED, 5).chances[1]
    assert len(a_tree(DIVIDED, 5, least).tokens) == 2
    assert a_tree(DIVIDED, 5, least_chance=0.95).tree == NO_TREE


def test_a_lookup_that_is_often_wrong_lowers_its_chances():
    method = NgramDraft(3, 2)
    method.open(an_open(tokens=DIVIDED, max_len=1000))
    length = len(DIVIDED)
    first = []
    for new in range(20, 60):
        (found,) = method.draft([DraftRequest("s", 1, length, 77, max_tokens=4, shape=Shape.TREE)])
        first.append(found.chances[0])
        method.committed("s", (new, 1, 2))
        length += 3
    assert first[-1] < first[0] / 2


# ---------------------------------------------------------------- lookahead


def outcomes_of(tree: DraftTree | tuple[int, ...], chances: tuple[float, ...] = ()) -> set[tuple[int, ...]]:
    found = propose(
        NgramDraft(3, 2), [wanted_block(DIVIDED, shape=Shape.TREE).under(tree, max_tokens=3, chances=chances)]
    )
    assert all(guess.tokens for guess in found)
    assert [guess.chance for guess in found] == sorted((guess.chance for guess in found), reverse=True)
    return {guess.outcome for guess in found}


def test_lookahead_skips_impossible_verdicts():
    outcomes = outcomes_of(DraftTree((3, 6, 4), (-1, -1, 0)))
    assert not outcomes & {(3,), (6,), (3, 4)}, "a draft token is accepted, and another comes after it"
    assert {(3, 5), (6, 9), (3, 4, 9)} <= outcomes


def test_lookahead_keeps_the_probabilities_of_another_methods_tokens():
    assert any(outcome[:3] == (8, 1, 2) for outcome in outcomes_of((8, 1, 2), (0.6, 0.5, 0.5)))
    assert not any(outcome[:3] == (8, 1, 2) for outcome in outcomes_of((8, 1, 2)))


# ---------------------------------------------------------------- occurrences


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
    found = found_in(*tokens, longest=longest, shortest=shortest)
    assert len(found) == len(plain) or len(found) >= 16, "many are enough"
    best = sorted(plain.items(), key=lambda place: (place[1], place[0]))[len(plain) - len(found) :]
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
    assert text.following_tokens((7,)).tolist() == [*range(1, 100), 7]


# ---------------------------------------------------------------- calibration

ONCE = (1, 2, 3, 9, 1, 2)  # 3 followed once
THRICE = (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2)
HALVED = (1, 2, 3, 1, 2, 4, 1, 2)


def evidence(tokens: tuple[int, ...]) -> Occurrences:
    return occurrences(np.array(tokens, dtype=np.int32), 4, 2)


def considered(calibration: NgramCalibration, tokens: tuple[int, ...], session: str = "s") -> Choices:
    return calibration.consider(session, (len(tokens), ()), evidence(tokens))


def learn(calibration: NgramCalibration, tokens: tuple[int, ...], came: int, session: str = "s") -> None:
    considered(calibration, tokens, session)
    calibration.committed(session, (*tokens, came))


def test_nothing_is_sure_and_more_evidence_is_surer():
    calibration = NgramCalibration()
    once = considered(calibration, ONCE).chance_of(3)
    thrice = considered(calibration, THRICE).chance_of(3)
    assert 0.3 < once < thrice < 1.0


def test_several_continuations_share_a_chance_and_the_likelier_is_first():
    choices = considered(NgramCalibration(), HALVED)
    assert choices.tokens == (4, 3)
    assert choices.chances[0] > choices.chances[1] > 0.1
    assert sum(choices.chances) < 0.8


def test_a_text_without_an_answer_gives_no_choice():
    assert considered(NgramCalibration(), (1, 2, 3)) == Choices((), ())


def test_a_lookup_that_is_often_wrong_gets_a_low_chance_and_of_its_kind_alone():
    calibration = NgramCalibration()
    before = considered(calibration, THRICE, "other").chance_of(3)
    for index in range(60):
        learn(calibration, ONCE, came=8, session=f"s{index}")
    assert considered(calibration, ONCE, "new").chance_of(3) < 0.1
    assert considered(calibration, THRICE, "new").chance_of(3) == before


def test_a_lookup_that_is_always_right_becomes_sure():
    calibration = NgramCalibration()
    for index in range(300):
        learn(calibration, ONCE, came=3, session=f"s{index}")
    assert considered(calibration, ONCE, "new").chance_of(3) > 0.9


def test_sessions_are_calibrated_separately_and_forgotten_when_they_close():
    calibration = NgramCalibration()
    for _ in range(12):
        learn(calibration, ONCE, came=8, session="free")
        learn(calibration, ONCE, came=3, session="copying")
    free = considered(calibration, ONCE, "free").chance_of(3)
    copying = considered(calibration, ONCE, "copying").chance_of(3)
    assert free < considered(calibration, ONCE, "new").chance_of(3) < copying
    calibration.close(["free", "unknown"])
    assert considered(calibration, ONCE, "free").chance_of(3) > free


def test_chances_converge_to_observed_rates():
    """In ambiguous texts, 4 follows in half of the cases and 3 in a fifth, within 5 standard errors of 1000 draws."""
    rng = random.Random(3)
    calibration = NgramCalibration()
    for index in range(1000):
        learn(calibration, HALVED, came=rng.choices((4, 3, 8), weights=(5, 2, 3))[0], session=f"s{index}")
    choices = considered(calibration, HALVED, "new")
    assert choices.chance_of(4) == pytest.approx(0.5, abs=0.1)
    assert choices.chance_of(3) == pytest.approx(0.2, abs=0.08)
