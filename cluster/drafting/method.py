"""Interface of drafting methods, and the drafting pass."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from cluster.drafting.requests import LookaheadRequest, Proposal, SessionUpdates
from protos.frozen import value
from protos.messages import DraftRequest, Open, Shape, StatesFormat

Early = Callable[[list[Proposal]], None]
"""Callback for intermediate proposals; later calls may add proposals or improve earlier ones."""


def dismiss(proposals: list[Proposal]) -> None:
    """Discards early proposals, for callers that need only the final result."""


class DraftingMethod(Protocol):
    """A source of draft tokens, used from a single thread.

    Under rejection sampling, a token must depend only on its prefix and the session's seed, and a block's length must
    not depend on drawn tokens.
    """

    @property
    def shapes(self) -> frozenset[Shape]:
        """Block shapes supported by the method."""
        ...

    @property
    def tokens_per_forward(self) -> int:
        """Number of tokens predicted per forward pass; drafting cost grows with the number of forward passes."""
        ...

    def open(self, request: Open) -> None:
        """Starts a session with its committed tokens. An earlier session of the same name must be closed first."""
        ...

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        """Appends newly committed tokens to a session."""
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Returns one proposal per request; each proposal continues the session's whole committed text."""
        ...

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Returns any number of proposals per request.

        Calls `early` with the current proposals, because a verdict may arrive at any time. Once `interrupted` returns
        True, a target is waiting for a block, and the method returns its current proposals. Under rejection sampling, a
        block cut short by an interruption or its deadline is returned with the tokens drafted so far.
        """
        ...

    def close(self, sessions: Sequence[str]) -> None:
        """Closes sessions; ignores unknown sessions."""
        ...


@runtime_checkable
class ReadsStates(Protocol):
    """Additional interface of a `DraftingMethod` that reads the target's hidden states."""

    @property
    def states_format(self) -> StatesFormat:
        """Format of hidden-state rows."""
        ...

    def states(self, session: str, first: int, rows: bytes) -> None:
        """Adds the target's encoded hidden states from position `first` of the session's committed text on.

        Each state of a session arrives once, in order; the first may be in the middle of the text. A block is requested
        only if states are complete from there on. Only the last token's state may be absent, because the target may not
        have read that token yet.
        """
        ...


@runtime_checkable
class LimitsStates(Protocol):
    """Additional interface of a `ReadsStates` method whose memory for states may be limited."""

    @property
    def max_states(self) -> int | None:
        """Maximum number of states over all sessions; None: no limit."""
        ...


class RecordsStates(Protocol):
    """Records the hidden states that a method receives, to keep them as training examples."""

    def open(self, request: Open) -> None: ...

    def states(self, session: str, first: int, rows: bytes) -> None: ...

    def close(self, sessions: Sequence[str]) -> None: ...


@runtime_checkable
class ExchangesWeights(Protocol):
    """Additional interface of a `DraftingMethod` that can exchange its weights while sessions are open."""

    def prepare_weights(self, folder: Path) -> Callable[[], object]:
        """Loads and checks the checkpoint in `folder`. Other threads may call this during a pass.

        Returns a function that swaps the weights; call it on the drafting thread between two passes. It takes well
        under a millisecond and returns the old weights, so that another thread can free them. Raises ModelError,
        without effect, if the checkpoint cannot replace the current one.
        """
        ...


@value
class DraftingPass:
    """Input of one drafting pass: session updates, and requests for blocks needed now or ahead of verdicts."""

    updates: SessionUpdates
    requests: tuple[DraftRequest, ...] = ()
    lookahead: tuple[LookaheadRequest, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.updates.closed or self.updates.states or self.requests or self.lookahead)

    @property
    def sessions(self) -> list[str]:
        """Names of the sessions with a request."""
        return [request.session for request in self.requests or self.lookahead]


def apply_updates(method: DraftingMethod, updates: SessionUpdates) -> None:
    """Applies session updates to a method; call this before drafting."""
    if updates.closed:
        method.close(tuple(updates.closed))
    for request in updates.opened.values():
        method.open(request)
    for session, tokens in updates.committed.items():
        method.committed(session, tokens)
    for session, (first, rows) in updates.states.items():
        assert isinstance(method, ReadsStates), "this method does not read hidden states"
        method.states(session, first, b"".join(rows))


def make_pass(
    method: DraftingMethod, drafting: DraftingPass, interrupted: Callable[[], bool], early: Early = dismiss
) -> list[Proposal]:
    """Applies the session updates to the method, then returns its proposals for the requests."""
    apply_updates(method, drafting.updates)
    if drafting.requests:
        return method.draft(drafting.requests)
    if drafting.lookahead:
        return method.draft_ahead(drafting.lookahead, interrupted, early)
    return []
