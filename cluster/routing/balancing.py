"""Choice of a replica for a session: pure, from a router's knowledge of each replica."""

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
    sessions: int  # of this router
    turn: int = 0  # place among equally loaded candidates
    worth: float = 0.0  # extra sessions that it may have and still be preferred for the session in question

    @property
    def rank(self) -> tuple[float, int, str]:
        """Sort key; the candidate with the lowest rank gets the next session."""
        return self.sessions - self.worth, self.turn, self.address


def turn(router: str, address: str) -> int:
    """Returns a replica's place among equally loaded ones, which differs between routers.

    A router knows only its own sessions. If ties were broken by address, all routers would give their first session to
    the same replica while others are idle.
    """
    return int.from_bytes(blake2b(f"{router} {address}".encode(), digest_size=4).digest())


def choose(candidates: Iterable[Candidate], avoid: frozenset[str] = frozenset()) -> str | None:
    """Returns the least loaded candidate, with ties broken by `turn`; one in `avoid` only if nothing else is left.

    Returns None if there is no candidate at all.
    """
    best = min(candidates, key=lambda c: (c.address in avoid, c.rank), default=None)
    return best.address if best else None


class Peers:
    """One pool as a router sees it: the replicas that accept sessions, and the number of the router's sessions on
    each."""

    def __init__(self, router: str) -> None:
        self.leaving: set[str] = set()  # announced that they end soon: they accept no more sessions, but may have some
        self._router = router
        self._sessions: Counter[str] = Counter()
        self._up: dict[str, Candidate] = {}  # by address
        self._ranked: list[tuple[float, int, str]] = []  # their ranks, lowest first

    def __bool__(self) -> bool:
        return bool(self._up)

    def __contains__(self, address: str) -> bool:
        """Returns True if the replica accepts sessions."""
        return address in self._up

    def up(self, address: str) -> None:
        """Marks a replica as accepting sessions, unless it is leaving."""
        self.down(address)
        if address in self.leaving:
            return
        self._up[address] = one = Candidate(address, self._sessions[address], turn(self._router, address))
        insort(self._ranked, one.rank)

    def down(self, address: str) -> None:
        """Marks a replica as accepting no more sessions; it may still have some."""
        one = self._up.pop(address, None)
        if one is not None:
            del self._ranked[bisect_left(self._ranked, one.rank)]

    def leaves(self, address: str) -> None:
        """Records the replica's announcement that it ends soon."""
        self.down(address)
        self.leaving.add(address)

    def gone(self, address: str) -> None:
        """Records that the replica's stream broke; a replica that comes back at this address counts as a new one."""
        self.down(address)
        self.leaving.discard(address)

    def moved(self, old: str | None, new: str | None) -> None:
        """Records that a session moved from one peer to another; None stands for no peer."""
        for address, change in ((old, -1), (new, 1)):
            if address is not None:
                self._sessions[address] += change
                if not self._sessions[address]:
                    del self._sessions[address]  # replicas that are gone for good are not kept
                if address in self._up:
                    self.up(address)

    def choose(
        self,
        takes: Callable[[str], bool],
        avoid: frozenset[str] = frozenset(),
        worth: Mapping[str, float] = NOTHING,
    ) -> str | None:
        """Returns a replica that accepts sessions now: the least loaded, after its `worth` in sessions is
        subtracted."""
        return choose([*self._contenders(takes, avoid), *self._favoured(takes, worth)], avoid)

    def spare(self, avoid: frozenset[str]) -> str | None:
        """Returns a replica with none of the router's sessions; one in `avoid` only if there is no other at all."""
        others = [one for one in self._up.values() if one.address not in avoid] or list(self._up.values())
        return choose(one for one in others if not one.sessions)

    def _favoured(self, takes: Callable[[str], bool], worth: Mapping[str, float]) -> Iterator[Candidate]:
        for address, sessions in worth.items():
            if address in self._up and takes(address):
                yield replace(self._up[address], worth=sessions)

    def _contenders(self, takes: Callable[[str], bool], avoid: frozenset[str]) -> Iterator[Candidate]:
        """Yields candidates by rank, up to the first that need not be avoided, so that large fleets are not scanned."""
        for _, _, address in self._ranked:
            if takes(address):
                yield self._up[address]
                if address not in avoid:
                    return
