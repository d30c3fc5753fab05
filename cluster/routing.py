"""Which replica a session goes to: a pure choice over what the router knows of each.

Knows nothing of sessions' content.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected replica as the router sees it."""

    address: str
    sessions: int  # sessions of this router that are on it

    def with_one_more(self) -> "Candidate":
        return replace(self, sessions=self.sessions + 1)


def choose(candidates: Iterable[Candidate], avoid: frozenset[str] = frozenset()) -> str | None:
    """The least loaded candidate, by address where equal; one in `avoid` only if nothing else is left.

    Returns None when there is no candidate at all.
    """
    best = min(candidates, key=lambda c: (c.address in avoid, c.sessions, c.address), default=None)
    return best.address if best else None
