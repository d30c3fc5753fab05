"""Which replica a session goes to: a pure choice over what the router knows of each.

Knows nothing of sessions' content.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected replica as the router sees it."""

    address: str
    sessions: int  # sessions of this router that are on it
    refused: bool = False  # it said recently that it is overloaded


def choose(candidates: Iterable[Candidate], avoid: frozenset[str] = frozenset()) -> str | None:
    """The least loaded candidate, by address where equal; one in `avoid` or overloaded only if nothing else is left.

    Returns None when there is no candidate at all.
    """
    ranked = sorted(candidates, key=lambda c: (c.address in avoid, c.refused, c.sessions, c.address))
    return ranked[0].address if ranked else None
