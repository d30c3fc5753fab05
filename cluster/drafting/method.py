"""The interface of drafting methods, live or simulated, which find candidate tokens; and a drafter's pass over one."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from cluster.drafting.requests import AheadRequest, Proposal
from cluster.drafting.session_texts import News
from protos.messages import DraftRequest, Open, Shape
from protos.states import StatesFormat
from protos.values import value

Early = Callable[[list[Proposal]], None]
"""Told of proposals while further ones, or better ones for the same outcomes, are being made."""


def dismiss(proposals: list[Proposal]) -> None:
    """For whoever only wants the result."""


class DraftingMethod(Protocol):
    """Called from one thread, one call at a time.

    Under ratio acceptance a token may depend on nothing but its prefix and the session's seed, and a block's length on
    nothing that was drawn.
    """

    @property
    def shapes(self) -> frozenset[Shape]:
        """Shapes of blocks that it can make."""
        ...

    @property
    def tokens_per_forward(self) -> int:
        """That one forward predicts after each prefix: what drafting costs goes by forwards."""
        ...

    def open(self, request: Open) -> None:
        """A session begins, with the tokens that are decided so far; one of its name was closed before."""
        ...

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        """Verdicts have brought these tokens, which come after all that were known."""
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each; the requests are for all tokens of their sessions."""
        ...

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Any number of proposals for each.

        `early` is told of what there is so far, for the verdict may come any time. It ends, with what there is, once
        `interrupted` says so: something is wanted for sure. Under ratio a block that an interruption or its verdict's
        time cut short is sent as far as it came.
        """
        ...

    def close(self, sessions: Sequence[str]) -> None:
        """Forgets sessions; unknown ones are ignored."""
        ...


@runtime_checkable
class ReadsStates(Protocol):
    """What a `DraftingMethod` has besides that reads the target's hidden states."""

    @property
    def states_format(self) -> StatesFormat:
        """How it takes rows, as the deployment's setup says."""
        ...

    def states(self, session: str, first: int, rows: bytes) -> None:
        """The target's states at positions `first`, `first` + 1, ... of the session's decided text, encoded.

        Those of a session come in order, each once, and may begin in mid-text. It is asked for a block only where it
        has those of all tokens from there on but the last, which the target need not have read yet; it may have that
        one's too.
        """
        ...


@value
class DraftingPass:
    """What a method is told, and then asked: for blocks that are wanted now, or else for blocks ahead of verdicts."""

    news: News
    requests: tuple[DraftRequest, ...] = ()
    ahead: tuple[AheadRequest, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.news.closed or self.news.states or self.requests or self.ahead)

    @property
    def sessions(self) -> list[str]:
        """That something is drafted for."""
        return [request.session for request in self.requests or self.ahead]


def tell(method: DraftingMethod, news: News) -> None:
    """What a method must have heard before it drafts."""
    if news.closed:
        method.close(news.closed)
    for request in news.opened:
        method.open(request)
    for session, tokens in news.committed:
        method.committed(session, tokens)
    for session, first, rows in news.states:
        assert isinstance(method, ReadsStates), "states reach only a method that reads them"
        method.states(session, first, rows)


def make_pass(
    method: DraftingMethod, drafting: DraftingPass, interrupted: Callable[[], bool], early: Early = dismiss
) -> list[Proposal]:
    """Tells the method what is new, and has it draft."""
    tell(method, drafting.news)
    if drafting.requests:
        return method.draft(drafting.requests)
    if drafting.ahead:
        return method.draft_ahead(drafting.ahead, interrupted, early)
    return []
