"""Which replica a session goes to: a pure choice over what a router knows of each."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType

NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected replica as the router sees it."""

    address: str
    sessions: int  # sessions of this router that are on it
    turn: int = 0  # its place among equals
    worth: float = 0.0  # sessions more that it may have and still be the better one, for the session in question

    @property
    def rank(self) -> tuple[float, int, str]:
        """The lowest is to have the next session."""
        return self.sessions - self.worth, self.turn, self.address


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
    best = min(candidates, key=lambda c: (c.address in avoid, c.rank), default=None)
    return best.address if best else None


class Peers:
    """One pool as a router sees it: who takes sessions, and how many of the router's each has."""

    def __init__(self, router: str) -> None:
        self.leaving: set[str] = set()  # said that they end soon: they take no more sessions, and may have some
        self._router = router
        self._sessions: Counter[str] = Counter()
        self._up: dict[str, Candidate] = {}  # by address
        self._ranked: list[tuple[float, int, str]] = []  # their ranks, the next one first

    def __bool__(self) -> bool:
        return bool(self._up)

    def __contains__(self, address: str) -> bool:
        """Whether it takes sessions."""
        return address in self._up

    def up(self, address: str) -> None:
        """It takes sessions from now on, or still does; not one that leaves."""
        self.down(address)
        if address in self.leaving:
            return
        self._up[address] = one = Candidate(address, self._sessions[address], turn(self._router, address))
        insort(self._ranked, one.rank)

    def down(self, address: str) -> None:
        """It takes no more sessions; it may have some."""
        one = self._up.pop(address, None)
        if one is not None:
            del self._ranked[bisect_left(self._ranked, one.rank)]

    def leaves(self, address: str) -> None:
        """It says that it ends soon."""
        self.down(address)
        self.leaving.add(address)

    def gone(self, address: str) -> None:
        """Its stream broke: who comes back, if anybody, is another."""
        self.down(address)
        self.leaving.discard(address)

    def moved(self, old: str | None, new: str | None) -> None:
        """A session left one peer for another."""
        for address, change in ((old, -1), (new, 1)):
            if address is not None:
                self._sessions[address] += change
                if not self._sessions[address]:
                    del self._sessions[address]  # who has left for good is not remembered
                if address in self._up:
                    self.up(address)

    def choose(
        self,
        takes: Callable[[str], bool],
        avoid: frozenset[str] = frozenset(),
        worth: Mapping[str, float] = NOTHING,
    ) -> str | None:
        """One of those that take sessions now: the least loaded, unless others are `worth` more than their load."""
        return choose([*self._contenders(takes, avoid), *self._favoured(takes, worth)], avoid)

    def spare(self, avoid: frozenset[str]) -> str | None:
        """One that takes sessions and has none of the router's; one in `avoid` only if there is no other at all."""
        others = [one for one in self._up.values() if one.address not in avoid] or list(self._up.values())
        return choose(one for one in others if not one.sessions)

    def _favoured(self, takes: Callable[[str], bool], worth: Mapping[str, float]) -> Iterator[Candidate]:
        for address, sessions in worth.items():
            if address in self._up and takes(address):
                yield replace(self._up[address], worth=sessions)

    def _contenders(self, takes: Callable[[str], bool], avoid: frozenset[str]) -> Iterator[Candidate]:
        """Up to the first that need not be avoided: a large fleet is not looked through for every session."""
        for _, _, address in self._ranked:
            if takes(address):
                yield self._up[address]
                if address not in avoid:
                    return
