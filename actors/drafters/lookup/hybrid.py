"""Hybrid drafts: n-gram drafts for repetitive text, drafts of a model for other text, or both in one tree.

Summaries, rewriting and code repeat earlier text, and an n-gram search is almost free; for other text, the model
predicts better. If the target accepts trees, a block contains the likeliest candidates of both methods, and the model
is skipped if the n-gram draft is confident. Otherwise, a block contains one of the two drafts. The choice depends only
on tokens before the block, so rejection sampling stays exact.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from actors.drafters.lookup import ngram
from actors.drafters.registry import DraftSetup, create_model_method
from cluster.config import DraftPool
from cluster.drafting.method import DraftingMethod, Early, ExchangesWeights, LimitsStates, ReadsStates, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, max_draft_tokens
from cluster.drafting.trees import merged
from cluster.errors import ModelError
from protos.messages import DraftRequest, Open, Shape, StatesFormat

AnyRequest = TypeVar("AnyRequest", DraftRequest, LookaheadRequest)

MIN_SURE_SHARE = 0.5  # the model is skipped above this expected accepted share of requested tokens


def create(draft: DraftPool, setup: DraftSetup) -> "HybridDraft":
    """Creates the method. Raises ModelError if the model does not fit the target."""
    return hybrid(ngram.create(draft, setup), create_model_method(draft, setup))


def hybrid(lookup: DraftingMethod, model: DraftingMethod) -> "HybridDraft":
    """Combines two methods. The result reads hidden states if `model` does."""
    return HybridStateDraft(lookup, model) if isinstance(model, ReadsStates) else HybridDraft(lookup, model)


class HybridDraft:
    """Combines two methods: `model` drafts if `lookup` finds nothing, or if trees are allowed and `lookup` is not
    confident.
    """

    def __init__(self, lookup: DraftingMethod, model: DraftingMethod) -> None:
        self._lookup = lookup
        self._model = model
        self._open: dict[str, Open] = {}

    @property
    def shapes(self) -> frozenset[Shape]:
        return self._model.shapes

    @property
    def tokens_per_forward(self) -> int:
        return self._model.tokens_per_forward

    def open(self, request: Open) -> None:
        self._open[request.session] = request
        self._lookup.open(request)
        self._model.open(request)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._lookup.committed(session, tokens)
        self._model.committed(session, tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        lookups = [proposal for proposal in self._lookup.draft(requests) if proposal.tokens]
        unsure = self._unsure_requests(requests, lookups)
        return self._combined(unsure, lookups, self._model.draft(unsure)) if unsure else lookups

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        lookups = [proposal for proposal in self._lookup.draft_ahead(requests, interrupted) if proposal.tokens]
        unsure = self._unsure_requests(requests, lookups)
        if not unsure:
            return lookups
        early(lookups)
        drafted = self._model.draft_ahead(
            unsure, interrupted, lambda so_far: early(self._combined(unsure, lookups, so_far))
        )
        return self._combined(unsure, lookups, drafted)

    def close(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self._open.pop(session, None)
        self._lookup.close(sessions)
        self._model.close(sessions)

    def prepare_weights(self, folder: Path) -> Callable[[], object]:
        if not isinstance(self._model, ExchangesWeights):
            raise ModelError(f"{folder} cannot be used: this method's weights cannot be exchanged; restart the drafter")
        return self._model.prepare_weights(folder)

    # ------------------------------------------------------------ helpers

    def _unsure_requests(self, requests: Sequence[AnyRequest], lookups: Iterable[Proposal]) -> list[AnyRequest]:
        """Returns the requests that also need the model."""
        expected: defaultdict[str, float] = defaultdict(float)  # expected accepted tokens, by session
        for proposal in lookups:
            expected[proposal.session] += proposal.chance * sum(proposal.chances)
        served = {proposal.session for proposal in lookups}
        return [
            request
            for request in requests
            if request.session not in served
            or (self._can_combine(request) and expected[request.session] < MIN_SURE_SHARE * request.max_tokens)
        ]

    def _can_combine(self, request: DraftRequest | LookaheadRequest) -> bool:
        return request.shape is Shape.TREE and self._open[request.session].takes_trees

    def _combined(
        self,
        requests: Sequence[DraftRequest | LookaheadRequest],
        lookups: Iterable[Proposal],
        drafted: Iterable[Proposal],
    ) -> list[Proposal]:
        """Merges two proposals for the same prefix; returns all proposals, likeliest outcomes first."""
        by_session = {request.session: request for request in requests}
        together: dict[tuple[str, int, int], Proposal] = {}
        for proposal in (*lookups, *drafted):
            address = (proposal.session, proposal.base_len, proposal.prefix_hash)
            other = together.get(address)
            together[address] = (
                proposal if other is None else self._merged(other, proposal, by_session[proposal.session])
            )
        return sorted(together.values(), key=lambda proposal: -proposal.chance)

    def _merged(self, one: Proposal, other: Proposal, request: DraftRequest | LookaheadRequest) -> Proposal:
        most = min(request.max_tokens, max_draft_tokens(self._open[request.session], one.base_len))
        return merged(one, other, most, request.least_chance)


class HybridStateDraft(HybridDraft):
    """`HybridDraft` that passes the target's hidden states to its model."""

    def __init__(self, lookup: DraftingMethod, model: DraftingMethod) -> None:
        super().__init__(lookup, model)
        assert isinstance(model, ReadsStates), "the model reads states"
        self._reader = model

    @property
    def states_format(self) -> StatesFormat:
        return self._reader.states_format

    @property
    def max_states(self) -> int | None:
        return self._reader.max_states if isinstance(self._reader, LimitsStates) else None

    def states(self, session: str, first: int, rows: bytes) -> None:
        self._reader.states(session, first, rows)
