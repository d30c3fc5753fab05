"""Adapter that decodes rows of hidden states from their wire encoding into tensors for a head."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from actors.compute.state_codec import decode_rows
from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal
from protos.messages import DraftRequest, Open, Shape
from protos.states import StatesFormat


class TakesRows(DraftingMethod, Protocol):
    """A drafting method that takes rows of hidden states as tensors."""

    def begin(self, session: str, first: int) -> None:
        """Announces that states of an open session start at position `first`; the default is 0."""
        ...

    def states(self, session: str, first: int, rows: Tensor) -> None:
        """Takes true states of the positions from `first` on, (n, width). Unknown sessions are ignored."""
        ...


class DecodedStates:
    """Wraps a method that takes rows as tensors as a `ReadsStates` method that takes encoded rows."""

    def __init__(self, method: TakesRows, layout: StatesFormat) -> None:
        self.states_format = layout
        self._method = method
        self._without: set[str] = set()  # sessions that have received no states yet

    @property
    def shapes(self) -> frozenset[Shape]:
        return self._method.shapes

    @property
    def tokens_per_forward(self) -> int:
        return self._method.tokens_per_forward

    def open(self, request: Open) -> None:
        self._method.open(request)
        self._without.add(request.session)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._method.committed(session, tokens)

    def states(self, session: str, first: int, rows: bytes) -> None:
        if session in self._without:
            self._without.remove(session)
            self._method.begin(session, first)
        self._method.states(session, first, decode_rows(rows, self.states_format))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return self._method.draft(requests)

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        return self._method.draft_ahead(requests, interrupted, early)

    def close(self, sessions: Sequence[str]) -> None:
        self._method.close(sessions)
        self._without.difference_update(sessions)


def decoded(method: TakesRows, layout: StatesFormat | None) -> DecodedStates:
    """Wraps `method` for a deployment, whose setup states how rows are encoded."""
    assert layout is not None, "a deployment whose method reads states says how they travel"
    return DecodedStates(method, layout)
