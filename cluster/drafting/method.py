"""Interface of drafting methods, live or simulated, and one drafting pass of a method."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from cluster.drafting.requests import LookaheadRequest, Proposal, SessionUpdates
from protos.frozen import value
from protos.messages import DraftRequest, Open, Shape, StatesFormat

Early = Callable[[list[Proposal]], None]
"""Callback that receives proposals while further ones, or better ones for the same outcomes, are being made."""


def dismiss(proposals: list[Proposal]) -> None:
    """Ignores early proposals, for callers that want only the final result."""


class DraftingMethod(Protocol):
    """A source of candidate tokens. It is called from one thread, one call at a time.

    Under rejection sampling, a token may depend only on its prefix and the session's seed, and a block's length must
    not depend on any drawn token.
    """

    @property
    def shapes(self) -> frozenset[Shape]:
        """Block shapes that the method can make."""
        ...

    @property
    def tokens_per_forward(self) -> int:
        """Tokens that one forward pass predicts after each prefix; the cost of drafting grows with forward passes."""
        ...

    def open(self, request: Open) -> None:
        """Starts a session with the tokens decided so far; an earlier session of that name has been closed."""
        ...

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        """Appends tokens from verdicts; they follow all tokens known so far."""
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Returns one proposal for each request; each request is for the whole committed text of its session."""
        ...

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Returns any number of proposals for each request.

        The method calls `early` with the proposals so far, because the verdict may arrive at any time. Once
        `interrupted` returns True, a block is wanted now: the method returns its proposals so far. Under rejection
        sampling, a block that is cut short by an interruption or by the time of its verdict is sent with the tokens
        drafted so far.
        """
        ...

    def close(self, sessions: Sequence[str]) -> None:
        """Forgets sessions; ignores unknown ones."""
        ...


@runtime_checkable
class ReadsStates(Protocol):
    """Additional methods of a `DraftingMethod` that reads the target's hidden states."""

    @property
    def states_format(self) -> StatesFormat:
        """Row format, set by the deployment's setup."""
        ...

    def states(self, session: str, first: int, rows: bytes) -> None:
        """Adds the target's encoded states at positions `first`, `first` + 1, ... of the session's committed text.

        The states of a session arrive in order, each once, and may begin in mid-text. A block is requested only if the
        method has the states of all tokens from there on except the last, which the target may not have read yet. The
        method may have the last token's states too.
        """
        ...


@runtime_checkable
class ExchangesWeights(Protocol):
    """Additional method of a `DraftingMethod` whose weights can be exchanged while sessions are open."""

    def prepare_weights(self, folder: Path) -> Callable[[], object]:
        """Loads and checks the checkpoint in `folder`. Any thread but the drafting thread may call it during a pass.

        Returns a function that exchanges the weights, to be called on the drafting thread between two passes. It takes
        well under a millisecond and returns the objects of the earlier weights, to be freed elsewhere. Raises
        ModelError if the checkpoint cannot replace the one in use, which then stays in use.
        """
        ...


@value
class DraftingPass:
    """Session changes for a method to apply, then its requests: blocks wanted now, or else blocks ahead of verdicts."""

    updates: SessionUpdates
    requests: tuple[DraftRequest, ...] = ()
    lookahead: tuple[LookaheadRequest, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.updates.closed or self.updates.states or self.requests or self.lookahead)

    @property
    def sessions(self) -> list[str]:
        """Names of the sessions that the pass drafts for."""
        return [request.session for request in self.requests or self.lookahead]


def apply_updates(method: DraftingMethod, updates: SessionUpdates) -> None:
    """Applies session changes to a method; required before the method drafts."""
    if updates.closed:
        method.close(tuple(updates.closed))
    for request in updates.opened.values():
        method.open(request)
    for session, tokens in updates.committed.items():
        method.committed(session, tokens)
    for session, (first, rows) in updates.states.items():
        assert isinstance(method, ReadsStates), "states reach only a method that reads them"
        method.states(session, first, b"".join(rows))


def make_pass(
    method: DraftingMethod, drafting: DraftingPass, interrupted: Callable[[], bool], early: Early = dismiss
) -> list[Proposal]:
    """Applies the pass's changes to the method and returns the method's proposals."""
    apply_updates(method, drafting.updates)
    if drafting.requests:
        return method.draft(drafting.requests)
    if drafting.lookahead:
        return method.draft_ahead(drafting.lookahead, interrupted, early)
    return []
