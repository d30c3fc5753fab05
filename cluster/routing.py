"""Which replica a session goes to: a pure choice over what the router knows of each.

Knows nothing of sessions' content.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected replica as the router sees it."""

    address: str
    sessions: int  # sessions of this router that are on it
    turn: int = 0  # its place among equals

    def with_one_more(self) -> "Candidate":
        return replace(self, sessions=self.sessions + 1)


def turn(router: str, address: str) -> int:
    """The place of a replica among equals: another one for every router.

    A router knows of its own sessions alone; were it by address, all routers would give their first session to the same
    replica while others are idle.
    """
    return int.from_bytes(blake2b(f"{router} {address}".encode(), digest_size=4).digest())


def choose(candidates: Iterable[Candidate], avoid: frozenset[str] = frozenset()) -> str | None:
    """The least loaded candidate, by its turn where equal; one in `avoid` only if nothing else is left.

    Returns None when there is no candidate at all.
    """
    best = min(candidates, key=lambda c: (c.address in avoid, c.sessions, c.turn, c.address), default=None)
    return best.address if best else None
