"""Drafting method that degrades: its proposals become noise."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal
from protos.messages import DraftRequest


class BecomingNoisyMethod:
    """Drafting method with wrong tokens in every proposal that `is_bad` selects."""

    def __init__(self, method: DraftingMethod, is_bad: Callable[[Proposal], bool], vocabulary: int) -> None:
        self._method = method
        self._is_bad = is_bad
        self._vocabulary = vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._spoilt(proposal) for proposal in self._method.draft(requests)]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        return [self._spoilt(proposal) for proposal in self._method.draft_ahead(requests, interrupted)]

    def _spoilt(self, proposal: Proposal) -> Proposal:
        if not self._is_bad(proposal):
            return proposal
        noise = tuple([(token + 1) % self._vocabulary for token in proposal.tokens])
        return replace(proposal, tree=replace(proposal.tree, tokens=noise))


class AfterTokens:
    """Selects every proposal after earlier proposals had a given total of tokens."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def __call__(self, proposal: Proposal) -> bool:
        is_bad = self._left <= 0
        self._left -= len(proposal.tokens)
        return is_bad
