"""Tests methods that look up continuations of the text's end, in the text or also in recent answers.

`test_methods.py` covers behavior common to all methods.
"""

from collections.abc import Callable
from typing import Any

import pytest

from actors.drafters.lookup.ngram import NgramDraft
from actors.drafters.lookup.suffix import SuffixLookup
from cluster.config_sections import SuffixOptions
from cluster.drafting.requests import Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Shape
from tests.unit.actors.drafters.drafting import DRAWN, REJECTION, block_of, propose, wanted_block

METHODS: dict[str, Callable[[], Any]] = {
    "ngram": lambda: NgramDraft(3, 2),
    "suffix": lambda: SuffixLookup(SuffixOptions(max_ngram=4, min_ngram=2), clock=lambda: 0.0),
}
DIVIDED = (1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 6, 9, 1, 2)  # 1 2 was followed by 3 4, 3 5 and 6


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    return METHODS[request.param]()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ((1, 2, 3, 4, 9, 1, 2), (3, 4, 9)),
        ((5, 1, 2, 7, 8, 1, 2, 9, 5, 1, 2), (7, 8, 1)),  # the longest suffix wins over a later, shorter match
        ((1, 2, 3, 4), ()),
        ((2, 3, 2), ()),  # one token is too short
        ((1,), ()),
    ],
    ids=["once", "longest", "none", "too short", "one token"],
)
def test_a_repeated_text_continues_as_before(method: Any, tokens: tuple[int, ...], expected: tuple[int, ...]) -> None:
    want = wanted_block(tokens)
    assert block_of(method, want) == Proposal("s", len(tokens), want.prefix_hash, DraftTree.chain(expected))


@pytest.mark.parametrize("unverified", [(3, 4), (3,), ()], ids=["block", "part of it", "non-speculative step"])
def test_lookahead_expects_a_repeated_text_to_repeat(method: Any, unverified: tuple[int, ...]) -> None:
    want = wanted_block((1, 2, 3, 4, 5, 6, 7, 1, 2))
    before = (3, 4, 5, 6, 7)
    guesses = {guess.outcome: guess for guess in propose(method, [want.under(unverified, max_tokens=2)])}
    size = len(unverified) + 1
    guess = guesses[before[:size]]
    assert guess.tokens == before[size : size + 2]
    assert len(guesses) == 1 or not isinstance(method, NgramDraft), "nothing else is known"


def test_with_rejection_sampling_a_lookup_is_a_chain_even_if_a_tree_is_requested(method: Any) -> None:
    for shape in Shape:
        changes = {"acceptance": REJECTION, "sampling": DRAWN, "least_chance": 0.9, "shape": shape}
        block = block_of(method, wanted_block((1, 2, 3, 4, 9, 1, 2), **changes))
        assert block.tree == DraftTree.chain((3, 4, 9)), "point masses, without probabilities"


def test_nothing_is_looked_up_past_the_end(method: Any) -> None:
    tokens = (1, 2, 3, 4, 5, 1, 2)
    for changes, expected in (({"stop_ids": (4,)}, []), ({"max_len": 10}, []), ({"max_len": 11}, [(5,)])):
        found = propose(method, [wanted_block(tokens, **changes).under((3,), max_tokens=2)])
        assert [guess.tokens for guess in found if guess.outcome == (3, 4)] == expected


def test_a_tree_has_each_continuation(method: Any) -> None:
    tree = block_of(method, wanted_block(DIVIDED, 30, shape=Shape.TREE)).tree
    assert set(tree.children(-1)) == {3, 6}
    assert set(tree.children(tree.tokens.index(3))) >= {5}


def test_lookahead_covers_each_known_continuation(method: Any) -> None:
    want = wanted_block(DIVIDED, shape=Shape.TREE)
    assert {(3,), (6,)} <= {guess.outcome for guess in propose(method, [want.under(NO_TREE)])}
    assert {(6, 9, 1), (3,)} <= {guess.outcome for guess in propose(method, [want.under((6, 9))])}
