"""The hybrid method uses the model exactly where the lookup has no match."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from actors.drafters.lookup.hybrid import HybridDraft, hybrid
from actors.drafters.lookup.ngram import NgramDraft
from actors.drafters.registry import create_method, states_needed
from cluster.config import DraftPool, validated
from cluster.drafting.method import Early, ReadsStates, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.errors import ConfigError
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import DraftRequest, Open, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting import (
    DRAWN,
    REJECTION,
    a_setup,
    block_of,
    decided,
    deployed_method,
    drafted,
    never,
    propose,
    wanted_block,
)
from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET, case, checkpoint
from tests.unit.cluster.samples import KEY, an_open

REPEATING = (5, 6, 7, 5, 6)
NEW = (1, 2, 3, 4, 5)


class RecordingMethod:
    """Method that records its requests."""

    shapes = frozenset(Shape)
    tokens_per_forward = 1

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.closed: list[str] = []
        self.texts: dict[str, list[int]] = {}
        self.interrupted: Callable[[], bool] | None = None

    def open(self, request: Open) -> None:
        self.texts[request.session] = list(request.tokens)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self.texts[session] += tokens

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self.sessions += [each.session for each in requests]
        return [Proposal(each.session, each.base_len, each.prefix_hash, DraftTree.chain((9,))) for each in requests]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        self.interrupted = interrupted
        self.sessions += [each.session for each in requests]
        return [
            Proposal(each.session, each.base_len, each.prefix_hash, DraftTree.chain((9,)), each.unverified.tokens)
            for each in requests
        ]

    def close(self, sessions: Sequence[str]) -> None:
        self.closed += sessions


def test_each_session_is_served_by_the_right_one_and_once() -> None:
    model = RecordingMethod()
    method = HybridDraft(NgramDraft(3, 2), model)
    wants = [wanted_block(NEW, 2, "new"), wanted_block(REPEATING, 2, "repeating")]
    assert sorted((p.session, p.tokens) for p in propose(method, wants)) == [("new", (9,)), ("repeating", (7, 5))]
    assert model.sessions == ["new"]
    assert propose(method, wants[1:])
    assert model.sessions == ["new"], "it is not even asked when there is nothing to ask it for"


def test_lookahead_calls_the_model_only_without_a_match_and_is_interruptible() -> None:
    model = RecordingMethod()
    wants = [wanted_block(REPEATING, 2, "repeating").under((7, 5)), wanted_block(NEW, 2, "new").under((7,))]
    found = propose(HybridDraft(NgramDraft(3, 2), model), wants, never)
    assert sorted((p.session, p.outcome) for p in found) == [("new", (7,)), ("repeating", (7, 5, 6))]
    assert model.sessions == ["new"]
    assert model.interrupted is never


def test_the_model_guesses_without_a_match_if_the_target_does_not_wait() -> None:
    (guess,) = propose(HybridDraft(NgramDraft(3, 2), RecordingMethod()), [wanted_block(NEW).under(NO_TREE)])
    assert guess.tokens == (9,)


def test_session_outcomes_reach_both_methods() -> None:
    model = RecordingMethod()
    lookup = NgramDraft(3, 2)
    method = HybridDraft(lookup, model)
    method.open(an_open("s", tokens=NEW))
    method.committed("s", (2, 3))
    assert model.texts["s"] == [*NEW, 2, 3]
    request = DraftRequest("s", 1, len(NEW) + 2, prefix_hash=1, max_tokens=2)
    (found,) = lookup.draft([request])
    assert found.tokens == (4, 5)
    method.close(["s"])
    assert model.closed == ["s"]


class Chanced(RecordingMethod):
    """Method that always predicts 9 and then 8."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [replace(each, tree=TREE, chances=CHANCES) for each in super().draft(requests)]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        super().draft_ahead(requests, interrupted)
        found = [
            Proposal(each.session, each.base_len + 1, Prefix(KEY, (*REPEATING, 7)).hash, TREE, (7,), chances=CHANCES)
            for each in requests
        ]
        early(found)
        return found


TREE = DraftTree.chain((9, 8))
CHANCES = (0.4, 0.2)


def test_candidates_of_both_methods_form_one_tree_if_trees_are_supported() -> None:
    model = Chanced()
    found = block_of(HybridDraft(NgramDraft(3, 2), model), wanted_block(REPEATING, shape=Shape.TREE))
    assert {7, 9} == set(found.tree.children(-1))
    assert len(found.tokens) == 3
    assert found.chances == tuple(sorted(found.chances, reverse=True))
    assert model.sessions == ["s"]


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [(REPEATING * 6, {}, (5, 6, 7)), (REPEATING, {"acceptance": REJECTION, "sampling": DRAWN}, (7, 5, 6))],
    ids=["a text that is sure", "rejection sampling"],
)
def test_the_model_is_skipped_where_lookup_suffices(text: Any, changes: Any, expected: Any) -> None:
    model = Chanced()
    found = block_of(HybridDraft(NgramDraft(3, 2), model), wanted_block(text, shape=Shape.TREE, **changes))
    assert found.tokens == expected
    assert found.tree.is_chain or not changes
    assert model.sessions == []


def test_lookahead_merges_blocks_of_equal_outcomes_and_sends_known_ones_early() -> None:
    reports: list[list[Proposal]] = []
    want = wanted_block(REPEATING, draft_tokens=8, shape=Shape.TREE).under(NO_TREE, max_tokens=3)
    found = propose(HybridDraft(NgramDraft(3, 2), Chanced()), [want], early=reports.append)
    assert [guess.outcome for guess in reports[0]] == [(7,)], "the text's own, before the model is asked"
    assert 9 not in reports[0][0].tree.children(-1)
    (both,) = [guess for guess in found if guess.outcome == (7,)]
    assert set(both.tree.children(-1)) == {5, 9}
    assert reports[-1] == found


# ---------------------------------------------------------------- over a head that reads states


THEN_EAGLE: dict[str, Any] = {"method": "hybrid", "hybrid": {"then": "eagle"}}


def test_states_pass_through_to_the_second_method() -> None:
    """Without matches, blocks equal those of the head alone."""
    want = wanted_block(decided(case("eagle3")), 2)
    draft = DraftPool.model_validate({**THEN_EAGLE, "model": str(checkpoint("eagle3")), "ngram": {"min_ngram": 4}})
    setup = a_setup(draft)
    rows = bytes(range(setup.states.row_bytes)) * (len(want.tokens) - 1)
    found = []
    for method in (create_method(draft, setup), deployed_method("eagle", checkpoint("eagle3"), "auto")):
        assert isinstance(method, ReadsStates)
        assert method.states_format == setup.states
        found.append(drafted(method, want, rows).tokens)
    assert found[0] == found[1] != ()


def test_without_a_head_nothing_of_the_target_is_read() -> None:
    draft = DraftPool(method="hybrid", model="org/draft")
    assert states_needed(draft, TARGET) is None
    assert not isinstance(hybrid(NgramDraft(4, 2), NgramDraft(4, 2)), ReadsStates)


@pytest.mark.parametrize(
    ("draft", "named"),
    [
        ({**THEN_EAGLE, "model": "m", "draft_model": {"min_confidence": 0.5}}, "options in draft_model"),
        ({"method": "hybrid", "model": "m", "eagle": {"max_positions": 9}}, "options in eagle"),
        ({"method": "hybrid", "model": "m", "states": {"keep": False}}, "reads no hidden states"),
        ({"method": "eagle", "model": "m", "hybrid": {"then": "eagle"}}, "options in hybrid"),
        (THEN_EAGLE, "needs a model"),
        ({"method": "hybrid", "hybrid": {"then": "mtp"}, "model": "m"}, "uses no model"),
        (
            {**THEN_EAGLE, "model": "m", "eagle": {"quantization": "int8"}, "resources": {"num_gpus": 1}},
            r"eagle\.quantization int8 requires CPUs",
        ),
    ],
)
def test_options_of_another_method_than_the_second_are_refused(draft: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        validated({"model": {"target": "t"}, "draft": draft})
    options = {**THEN_EAGLE, "model": "m", "eagle": {"max_positions": 9}, "states": {"keep": False}}
    assert validated({"model": {"target": "t"}, "draft": options}).draft.model_method == "eagle"
