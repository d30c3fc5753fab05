"""Suffix lookup as a method: own text and recent answers, chains and trees, ahead of verdicts, what is remembered."""

from typing import Any

import pytest

from actors.drafters.lookup.suffix import SuffixLookup
from cluster.config_sections import SuffixOptions
from cluster.drafting.requests import Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Sampling, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting_requests import Want, propose
from tests.unit.cluster.samples import KEY, an_open

DRAWN = Sampling(temperature=1.0)


def a_method(remembered: int = 1000, shortest: int = 2) -> SuffixLookup:
    return SuffixLookup(SuffixOptions(max_ngram=4, min_ngram=shortest, remembered_tokens=remembered), clock=lambda: 0.0)


def a_want(tokens: tuple[int, ...], unverified: tuple[int, ...] | None = None, **changes: Any) -> Want:
    asked = {"max_tokens": 3, "shape": Shape.CHAIN, "least_chance": 0.0}
    asked |= {key: changes.pop(key) for key in asked.keys() & changes.keys()}
    tree = None if unverified is None else DraftTree.chain(unverified)
    return Want(an_open(**changes), tokens, Prefix(KEY, tokens).hash, unverified=tree, **asked)


def answer(method: SuffixLookup, tokens: tuple[int, ...], **changes: Any) -> None:
    """A session from its first token to its end."""
    method.open(an_open("before", tokens=(50,), **changes))
    method.committed("before", tokens)
    method.close(["before"])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((1, 2, 3, 4, 9, 1, 2), (3, 4, 9)),
        ((1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 1, 2), (3, 1, 2)),  # more often than the other
        ((5, 1, 2, 7, 8, 1, 2, 9, 5, 1, 2), (7, 8, 1)),  # after more of the text's end
        ((1, 2, 3, 4), ()),
        ((2, 3, 2), ()),  # one token is too short
        ((1,), ()),
    ],
    ids=["once", "most frequent", "longest", "none", "too short", "one token"],
)
def test_the_text_goes_on_as_it_did_before(tokens, expected):
    (proposal,) = propose(a_method(), [a_want(tokens)])
    assert proposal == Proposal("s", len(tokens), Prefix(KEY, tokens).hash, DraftTree.chain(expected))


def test_answers_that_have_ended_are_known_to_other_sessions():
    method = a_method()
    answer(method, (1, 2, 3, 4, 5))
    (proposal,) = propose(method, [a_want((9, 1, 2))])
    assert proposal.tokens == (3, 4, 5)
    (proposal,) = propose(a_method(remembered=0), [a_want((9, 1, 2))])
    assert proposal.tokens == ()


def test_answers_are_known_to_sessions_with_their_own_cache_salt_alone():
    method = a_method()
    answer(method, (1, 2, 3, 4, 5), cache_salt="key a")
    for salt, known in (("key a", (3, 4, 5)), ("key b", ()), ("", ())):
        (proposal,) = propose(method, [a_want((9, 1, 2), cache_salt=salt)])
        assert proposal.tokens == known


def test_prompts_are_not_remembered_but_for_where_the_answer_begins():
    method = a_method()
    method.open(an_open("before", tokens=(20, 21, 22, 23, 1, 2)))
    method.committed("before", (3, 4))
    method.close(["before"])
    (found,) = propose(method, [a_want((1, 2))])
    assert found.tokens == (3, 4)
    (nothing,) = propose(method, [a_want((20, 21))])
    assert nothing.tokens == ()


def test_an_answer_sampled_under_ratio_is_not_remembered():
    """Its session may come again, and be decided by the noise that its tokens came of."""
    for sampling, acceptance, is_known in (
        (DRAWN, Acceptance.REJECTION, False),
        (Sampling(temperature=0.0), Acceptance.REJECTION, True),
        (DRAWN, Acceptance.COUPLED, True),
    ):
        method = a_method()
        answer(method, (1, 2, 3), sampling=sampling, acceptance=acceptance)
        (proposal,) = propose(method, [a_want((1, 2))])
        assert (proposal.tokens == (3,)) == is_known


def test_a_session_s_text_is_found_in_as_it_grows():
    method = a_method()
    method.open(an_open(tokens=(1, 2)))
    method.committed("s", (3, 1, 2))
    (proposal,) = method.draft([a_want((1, 2, 3, 1, 2)).request])
    assert proposal.tokens == (3, 1, 2)


TWICE = (1, 2, 3, 7, 1, 2, 4, 8, 1, 2, 4, 9, 1, 2)


def test_a_tree_has_what_followed_by_how_often_it_did():
    (proposal,) = propose(a_method(), [a_want(TWICE, max_tokens=5, shape=Shape.TREE)])
    assert proposal.tree.main_path[0] == 4
    assert set(proposal.tree.children(-1)) == {4, 3}
    assert set(proposal.tree.children(0)) == {9, 8}
    assert len(proposal.tree) == 5


def test_under_ratio_and_where_the_target_takes_no_trees_it_is_the_chain_of_the_most_frequent():
    for changes in (
        {"shape": Shape.CHAIN},
        {"shape": Shape.TREE, "sampling": DRAWN, "acceptance": Acceptance.REJECTION},
    ):
        (proposal,) = propose(a_method(), [a_want(TWICE, **changes)])
        assert proposal.tree == DraftTree.chain((4, 9, 1)), "point masses, without probabilities"


def test_what_is_too_unlikely_is_not_sent_but_for_ratio_s_sake():
    """Half of the chance is at first that of something new; of the rest, two thirds are the token's that came twice."""
    for least, tokens in ((0.3, (4,)), (0.16, (4, 3)), (0.35, ())):
        (proposal,) = propose(a_method(), [a_want(TWICE, shape=Shape.TREE, least_chance=least)])
        assert proposal.tokens == tokens
    ratio = {"sampling": DRAWN, "acceptance": Acceptance.REJECTION}
    (proposal,) = propose(a_method(), [a_want(TWICE, least_chance=0.9, **ratio)])
    assert proposal.tokens == (4, 9, 1)


def test_chances_are_learned_from_what_was_decided():
    method = a_method()
    method.open(an_open(tokens=(1, 2, 3)))
    for _ in range(20):
        method.committed("s", (1, 2, 3))
    (proposal,) = method.draft([a_want((1, 2, 3) * 21, shape=Shape.TREE, least_chance=0.7).request])
    assert proposal.tokens == (1, 2, 3), "what always went on as before is likely to do so again"


@pytest.mark.parametrize("unverified", [(3, 4), (3,), ()], ids=["block", "part of it", "plain step"])
def test_ahead_the_text_is_expected_to_go_on_as_it_did_before(unverified):
    tokens = (1, 2, 3, 4, 5, 6, 7, 1, 2)
    method = a_method()
    guesses = {guess.outcome: guess for guess in propose(method, [a_want(tokens, unverified, max_tokens=2)])}
    outcome = (3, 4, 5, 6, 7)[: len(unverified) + 1]
    guess = guesses[outcome]
    whole = (*tokens, *outcome)
    assert (guess.base_len, guess.prefix_hash) == (len(whole), Prefix(KEY, whole).hash)
    method.open(an_open(tokens=tokens))
    method.committed("s", outcome)
    (now,) = method.draft([a_want(whole, max_tokens=2).request])
    assert guess.tokens == now.tokens, "as if the verdict were in: a function of the prefix alone"


def test_ahead_there_are_blocks_for_what_may_stand_in_the_block_s_place():
    outcomes = {guess.outcome for guess in propose(a_method(), [a_want(TWICE, (4,), max_tokens=2)])}
    assert {(3,), (4, 9), (4, 8)} <= outcomes


def test_where_the_text_has_nothing_ahead_a_target_that_does_not_wait_is_told_so():
    assert propose(a_method(), [a_want((1, 2, 3, 4), ())]) == [
        Proposal("s", 4, Prefix(KEY, (1, 2, 3, 4)).hash, NO_TREE)
    ]
    assert propose(a_method(), [a_want((1, 2, 3, 4), (9,))]) == []


def test_closing_a_session_twice_or_an_unknown_one_is_nothing():
    method = a_method()
    answer(method, (1, 2, 3))
    method.close(["before", "other"])
    (proposal,) = propose(method, [a_want((1, 2))])
    assert proposal.tokens == (3,)
