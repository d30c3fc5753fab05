"""Prompt lookup where the text repeats itself, the draft model elsewhere.

Summaries, rewriting and code repeat their text, and a lookup costs nothing; elsewhere the model knows better. Which of
the two drafts depends on tokens before the block alone, so ratio acceptance stays exact.
"""

from collections.abc import Callable, Sequence

from actors.methods import loading, prompt_lookup
from actors.methods.setup import DraftSetup
from cluster.config import DraftPool
from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal
from protos.messages import DraftRequest, Open, Shape


def create(draft: DraftPool, setup: DraftSetup) -> "LookupFirst":
    return LookupFirst(prompt_lookup.create(draft, setup), loading.create(draft, setup))


class LookupFirst:
    """Two methods as one: `model` drafts what `lookup` has nothing to offer for."""

    def __init__(self, lookup: DraftingMethod, model: DraftingMethod) -> None:
        self._lookup = lookup
        self._model = model

    @property
    def shapes(self) -> frozenset[Shape]:
        return self._model.shapes

    @property
    def tokens_per_forward(self) -> int:
        return self._model.tokens_per_forward

    def open(self, request: Open) -> None:
        self._lookup.open(request)
        self._model.open(request)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._lookup.committed(session, tokens)
        self._model.committed(session, tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        found = [proposal for proposal in self._lookup.draft(requests) if proposal.tokens]
        served = {proposal.session for proposal in found}
        rest = [request for request in requests if request.session not in served]
        return found + (self._model.draft(rest) if rest else [])

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        found = [proposal for proposal in self._lookup.draft_ahead(requests, interrupted) if proposal.tokens]
        served = {proposal.session for proposal in found}
        rest = [request for request in requests if request.session not in served]
        return found + (self._model.draft_ahead(rest, interrupted, early) if rest else [])

    def close(self, sessions: Sequence[str]) -> None:
        self._lookup.close(sessions)
        self._model.close(sessions)
