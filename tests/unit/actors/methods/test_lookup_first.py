"""The model is asked exactly where the text itself has no answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.methods.lookup_first import LookupFirst
from actors.methods.prompt_lookup import PromptLookup
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import DraftRequest, Open, Shape
from tests.unit.actors.methods.asking import Want, never, propose
from tests.unit.cluster.samples import an_open

REPEATING = (5, 6, 7, 5, 6)
NEW = (1, 2, 3, 4, 5)


class Asked:
    """A model that remembers what it was asked for."""

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
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        self.interrupted = interrupted
        self.sessions += [each.session for each in requests]
        return [
            Proposal(each.session, each.base_len, each.prefix_hash, DraftTree.chain((9,)), each.unverified.tokens)
            for each in requests
        ]

    def close(self, sessions: Sequence[str]) -> None:
        self.closed += sessions


def a_want(session: str, tokens: tuple[int, ...]) -> Want:
    return Want(an_open(session, tokens=tokens), tokens, 1, max_tokens=2)


def test_each_session_is_served_by_the_right_one_and_once() -> None:
    model = Asked()
    method = LookupFirst(PromptLookup(3, 2), model)
    wants = [a_want("new", NEW), a_want("repeating", REPEATING)]
    proposals = sorted((p.session, p.tokens) for p in propose(method, wants, never))
    assert proposals == [("new", (9,)), ("repeating", (7, 5))]
    assert model.sessions == ["new"]
    assert propose(method, wants[1:], never)
    assert model.sessions == ["new"], "it is not even asked when there is nothing to ask it for"


def test_ahead_too_the_model_is_asked_only_where_the_text_has_no_answer_and_can_be_interrupted() -> None:
    model = Asked()
    method = LookupFirst(PromptLookup(3, 2), model)
    copied = a_want("repeating", REPEATING)
    new = a_want("new", NEW)
    proposals = propose(
        method,
        [replace(copied, unverified=DraftTree.chain((7, 5))), replace(new, unverified=DraftTree.chain((7,)))],
        never,
    )
    assert sorted((p.session, p.outcome) for p in proposals) == [("new", (7,)), ("repeating", (7, 5, 6))]
    assert model.sessions == ["new"]
    assert model.interrupted is never


def test_the_model_guesses_for_a_target_that_does_not_wait_where_the_text_has_no_answer() -> None:
    model = Asked()
    method = LookupFirst(PromptLookup(3, 2), model)
    (proposal,) = propose(method, [replace(a_want("new", NEW), unverified=NO_TREE)], never)
    assert proposal.tokens == (9,)


def test_what_becomes_of_sessions_reaches_both() -> None:
    model = Asked()
    lookup = PromptLookup(3, 2)
    method = LookupFirst(lookup, model)
    method.open(an_open("s", tokens=NEW))
    method.committed("s", (2, 3))
    assert model.texts["s"] == [*NEW, 2, 3]
    request = DraftRequest("s", 1, len(NEW) + 2, prefix_hash=1, max_tokens=2)
    (found,) = lookup.draft([request])
    assert found.tokens == (4, 5)
    method.close(["s"])
    assert model.closed == ["s"]
