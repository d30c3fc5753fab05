"""Asking a drafting method about a text at once, whatever it was told of the session before."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal
from protos.draft_tree import DraftTree
from protos.frozen import value
from protos.messages import DraftRequest, Open, Shape


@value
class Want:
    """A session's text, and what is asked for after it: with `unverified`, for what may come of a step over that."""

    open: Open
    tokens: tuple[int, ...]
    prefix_hash: int
    max_tokens: int
    unverified: DraftTree | None = None
    until: float = math.inf
    least_chance: float = 0.0
    shape: Shape = Shape.CHAIN

    @property
    def request(self) -> DraftRequest:
        return DraftRequest(
            session=self.open.session,
            attempt=self.open.attempt,
            base_len=len(self.tokens),
            prefix_hash=self.prefix_hash,
            max_tokens=self.max_tokens,
            least_chance=self.least_chance,
            shape=self.shape,
        )

    @property
    def ahead(self) -> AheadRequest:
        assert self.unverified is not None
        return AheadRequest(
            session=self.open.session,
            base_len=len(self.tokens),
            prefix_hash=self.prefix_hash,
            max_tokens=self.max_tokens,
            unverified=self.unverified,
            until=self.until,
            least_chance=self.least_chance,
            shape=self.shape,
        )


def never() -> bool:
    return False


def propose(
    method: DraftingMethod,
    wants: Sequence[Want],
    interrupted: Callable[[], bool] = never,
    early: Early = dismiss,
) -> list[Proposal]:
    """Opens the sessions with their texts; what is cached of them stays. Blocks wanted now come before those ahead."""
    for want in wants:
        method.open(replace(want.open, tokens=want.tokens))
    requests = [want.request for want in wants if want.unverified is None]
    ahead = [want.ahead for want in wants if want.unverified is not None]
    found = method.draft(requests) if requests else []
    return found + (method.draft_ahead(ahead, interrupted, early) if ahead else [])
