"""Drafters' messages for sessions that no router has opened yet, bounded in number, bytes and age.

A drafter may receive a session before its target does. Until the session is opened, its assigned drafter is unknown, so
messages are kept separately per drafter, and each drafter has its own limits. The cost of a message does not depend on
the number that wait.
"""

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field

from cluster.verification.block_buffer import BlockCounts
from protos.codec import encoded_bytes
from protos.messages import Attach, Block

REMEMBERED = 4096  # ended sessions that are kept, so that their late blocks are dropped at once


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Bounds on waiting messages."""

    blocks: int = 64  # per session
    age_s: float = 30.0
    sessions: int = 1024  # per drafter
    bytes: int = 16 << 20  # per drafter
    all_bytes: int = 256 << 20  # over all drafters, since a peer may use many names


@dataclass
class Waiting:
    """Messages of one drafter for one session."""

    since: float
    drafter: str
    attach: Attach | None = None
    blocks: list[Block] = field(default_factory=list)
    bytes: int = 0  # size of the blocks


class EarlyMessages:
    """All messages that wait for an Open; those that do not fit or that expire are counted."""

    def __init__(self, limits: BufferLimits, counts: BlockCounts) -> None:
        self._limits = limits
        self._counts = counts
        self._waiting: OrderedDict[tuple[str, str], Waiting] = OrderedDict()  # by session and drafter, oldest first
        self._drafters: defaultdict[str, list[str]] = defaultdict(list)  # by session, in order of arrival
        self._sessions: defaultdict[str, dict[str, None]] = defaultdict(dict)  # by drafter
        self._bytes: Counter[str] = Counter()  # of waiting blocks, by drafter
        self._all_bytes = 0
        self._ended: OrderedDict[str, None] = OrderedDict()  # most recently ended sessions

    def __len__(self) -> int:
        return len(self._waiting)

    def attach(self, drafter: str, attach: Attach, now: float) -> None:
        if waiting := self._place_of(attach.session, drafter, now):
            waiting.attach = attach

    def detach(self, drafter: str, session: str) -> None:
        """Drops the Attach of a drafter that left the session before it was opened here."""
        if waiting := self._waiting.get((session, drafter)):
            waiting.attach = None

    def block(self, drafter: str, block: Block, now: float) -> None:
        if block.session in self._ended and (block.session, drafter) not in self._waiting:
            self._counts.drop("ended", block)
            return
        waiting = self._place_of(block.session, drafter, now)
        if waiting is None or len(waiting.blocks) >= self._limits.blocks or self._is_full(drafter):
            self._counts.drop("buffer_full", block)
            return
        size = encoded_bytes(block)
        waiting.blocks.append(block)
        waiting.bytes += size
        self._bytes[drafter] += size
        self._all_bytes += size

    def take(self, session: str) -> list[Waiting]:
        """Returns the messages that waited for a session that is now open, by drafter, in order of arrival."""
        self._ended.pop(session, None)
        return [self._remove(session, drafter) for drafter in list(self._drafters.get(session, ()))]

    def ended(self, session: str) -> None:
        """Records that a session is over, so that its further blocks count as late, not early."""
        self._ended[session] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def drafter_gone(self, drafter: str) -> None:
        for session in list(self._sessions.get(drafter, ())):
            self._discard(self._remove(session, drafter), "drafter_gone")

    def next_expiry(self) -> float | None:
        """Returns the time at which `expire` will have something to do; None if nothing waits."""
        oldest = next(iter(self._waiting.values()), None)
        return oldest.since + self._limits.age_s if oldest is not None else None

    def expire(self, now: float) -> None:
        while (due := self.next_expiry()) is not None and now >= due:
            self._discard(self._remove(*next(iter(self._waiting))), "expired")

    def _place_of(self, session: str, drafter: str, now: float) -> Waiting | None:
        """Returns this drafter's queue for the session; None if the drafter has reached its limit of sessions."""
        waiting = self._waiting.get((session, drafter))
        if waiting is not None:
            return waiting
        if len(self._sessions.get(drafter, ())) >= self._limits.sessions:
            return None
        self._drafters[session].append(drafter)
        self._sessions[drafter][session] = None
        self._waiting[session, drafter] = Waiting(now, drafter)
        return self._waiting[session, drafter]

    def _remove(self, session: str, drafter: str) -> Waiting:
        """Removes a queue from every index, and the drafter's and session's entries if they are then empty."""
        waiting = self._waiting.pop((session, drafter))
        self._drafters[session].remove(drafter)
        if not self._drafters[session]:
            del self._drafters[session]
        del self._sessions[drafter][session]
        self._bytes[drafter] -= waiting.bytes
        if not self._sessions[drafter]:
            del self._sessions[drafter]
            del self._bytes[drafter]
        self._all_bytes -= waiting.bytes
        return waiting

    def _discard(self, waiting: Waiting, cause: str) -> None:
        for block in waiting.blocks:
            self._counts.drop(cause, block)

    def _is_full(self, drafter: str) -> bool:
        return self._bytes[drafter] > self._limits.bytes or self._all_bytes > self._limits.all_bytes
