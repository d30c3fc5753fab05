"""The interface of drafting methods: what finds candidate tokens for a drafter, live or simulated."""

from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.drafting.requests import Proposal, Want

Early = Callable[[list[Proposal]], None]
"""Told of proposals while further ones, or better ones for the same outcomes, are being made."""


def dismiss(proposals: list[Proposal]) -> None:
    """For whoever only wants the result."""


class DraftingMethod(Protocol):
    """Called from one thread, one call at a time."""

    @property
    def tokens_per_forward(self) -> int:
        """That one forward predicts after each prefix: what drafting costs goes by forwards."""
        ...

    def propose(self, wants: Sequence[Want], interrupted: Callable[[], bool], early: Early = dismiss) -> list[Proposal]:
        """One proposal per want; for a want ahead any number.

        Drafting ahead tells `early` of what there is so far, for the verdict may come any time; and it ends, with what
        there is, once `interrupted` says so: something is wanted for sure. Under ratio
        acceptance a token may depend on nothing but its prefix and the want's seed, and the length on nothing that
        was drawn: a block that an interruption or its verdict's time cut short is sent as far as it came.
        """
        ...

    def close(self, sessions: Sequence[str]) -> None:
        """Forgets sessions; unknown ones are ignored."""
        ...
