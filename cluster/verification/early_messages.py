"""Messages of drafters for sessions that no router has opened yet, bounded in number, bytes and age.

A drafter may hear of a session before its target does.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from cluster.verification.block_buffer import BlockCounts
from protos.codec import encoded_bytes
from protos.messages import Attach, Block

REMEMBERED = 4096  # sessions that are over and whose late blocks are dropped at sight


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Bounds of what may wait."""

    blocks: int = 64  # per session
    age_s: float = 30.0
    sessions: int = 1024  # per drafter
    bytes: int = 16 << 20  # per drafter


@dataclass
class Waiting:
    """What one drafter sent for one session."""

    since: float
    drafter: str
    attach: Attach | None = None
    blocks: list[Block] = field(default_factory=list)


class EarlyMessages:
    """All that waits for an Open; what has no place or expires is counted."""

    def __init__(self, limits: BufferLimits, counts: BlockCounts) -> None:
        self._limits = limits
        self._counts = counts
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()  # by session, oldest first
        self._ended: OrderedDict[str, None] = OrderedDict()  # latest sessions that are over

    def __len__(self) -> int:
        return len(self._waiting)

    def attach(self, drafter: str, attach: Attach, now: float) -> None:
        if waiting := self._place_of(attach.session, drafter, now):
            waiting.attach = attach

    def detach(self, drafter: str, session: str) -> None:
        """The drafter has left the session before it was opened here."""
        waiting = self._waiting.get(session)
        if waiting is not None and waiting.drafter == drafter:
            waiting.attach = None

    def block(self, drafter: str, block: Block, now: float) -> None:
        if block.session in self._ended and block.session not in self._waiting:
            self._counts.drop("ended", block)
            return
        waiting = self._place_of(block.session, drafter, now)
        if waiting is None or len(waiting.blocks) >= self._limits.blocks or self._is_full(drafter):
            self._counts.drop("buffer_full", block)
        else:
            waiting.blocks.append(block)

    def take(self, session: str) -> Waiting | None:
        """The session is open: what waited for it, if anything."""
        self._ended.pop(session, None)
        return self._waiting.pop(session, None)

    def ended(self, session: str) -> None:
        """The session is over: blocks that come for it now are late, not early."""
        self._ended[session] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def drafter_gone(self, drafter: str) -> None:
        for session in [session for session, waiting in self._waiting.items() if waiting.drafter == drafter]:
            self._discard(self._waiting.pop(session), "drafter_gone")

    def next_expiry(self) -> float | None:
        """When `expire` will have something to do."""
        oldest = next(iter(self._waiting.values()), None)
        return oldest.since + self._limits.age_s if oldest is not None else None

    def expire(self, now: float) -> None:
        while (due := self.next_expiry()) is not None and now >= due:
            _, expired = self._waiting.popitem(last=False)
            self._discard(expired, "expired")

    def _place_of(self, session: str, drafter: str, now: float) -> Waiting | None:
        """Where this drafter's mail for the session waits; None when the drafter has filled its share."""
        waiting = self._waiting.get(session)
        if waiting is not None and waiting.drafter == drafter:
            return waiting
        if sum(w.drafter == drafter for w in self._waiting.values()) >= self._limits.sessions:
            return None
        if waiting is not None:
            self._discard(waiting, "other_drafter")
        self._waiting[session] = Waiting(now, drafter)
        self._waiting.move_to_end(session)
        return self._waiting[session]

    def _discard(self, waiting: Waiting, cause: str) -> None:
        for block in waiting.blocks:
            self._counts.drop(cause, block)

    def _is_full(self, drafter: str) -> bool:
        blocks = (block for w in self._waiting.values() if w.drafter == drafter for block in w.blocks)
        return sum(encoded_bytes(block) for block in blocks) > self._limits.bytes
