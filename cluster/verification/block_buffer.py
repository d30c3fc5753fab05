"""Draft blocks that wait for a step, and messages that arrive before their session is opened.

A block waits under the length and prefix hash that it was drafted for. A drafter may receive a session before its
target does. Until the session is opened, its assigned drafter is unknown, so such messages are kept separately per
drafter, each with its own limits on number, bytes and age. Handling a message takes the same time however many wait.
"""

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field

from protos.codec import encoded_bytes
from protos.messages import Acceptance, Attach, Block, Open
from protos.prefix import Prefix


@dataclass(slots=True)
class TargetCounts:
    """Totals of one target replica since startup."""

    dropped: Counter[str] = field(default_factory=Counter)  # blocks that were not verified, by cause
    unrequested: int = 0  # blocks for sessions that are not open, or assigned to another drafter
    rebased: int = 0  # late blocks that were verified from the target's current length
    accepted_tokens: int = 0  # draft tokens that verdicts accepted
    wasted_tokens: int = 0  # draft tokens in well-formed blocks that no verdict accepted, once that is certain
    known_tokens: int = 0  # committed tokens fed, counted again if lost from the cache and recomputed
    step_s: float = 0.0  # seconds spent in steps
    idle_s: float = 0.0  # seconds with sessions but no step, usually waiting for blocks
    nonfinite: int = 0  # sessions that ended because their logits were NaN or infinite

    def drop(self, cause: str, block: Block) -> None:
        """Counts a block that will not be verified."""
        self.dropped[cause] += 1
        self.wasted_tokens += block.size


class BlockBuffer:
    """Waiting blocks of one session by (base_len, prefix_hash), at most `limit`."""

    def __init__(self, limit: int, counts: TargetCounts) -> None:
        self.ready_since = 0.0  # arrival time of the ready block, in seconds
        self._limit = limit
        self._counts = counts
        self._blocks: dict[tuple[int, int], Block] = {}
        self._unsettled = 0  # tokens stored, replaced versions included, not yet counted as accepted or wasted

    def ready(self, prefix: Prefix) -> Block | None:
        """Returns the block for exactly this prefix, which may go into a step now, or None."""
        return self._blocks.get((prefix.length, prefix.hash)) if self._blocks else None

    def take(self, base_len: int, prefix_hash: int) -> None:
        """Removes the block that was verified for this prefix."""
        del self._blocks[base_len, prefix_hash]

    def place(self, block: Block, request: Open, prefix: Prefix, now: float) -> None:
        """Stores a block until its prefix is decided; drops and counts one that can never be verified."""
        if block.base_len < prefix.length:
            late = block
            block = self._rebased(block, prefix) or block
            if block is late:
                self._counts.drop("stale", block)
                return
            self._counts.wasted_tokens += late.size - block.size
        if cause := self._unfit(block, request, prefix):
            self._counts.drop(cause, block)
            return
        self._blocks[block.base_len, block.prefix_hash] = block
        self._unsettled += block.size
        if _is_for(block, prefix):
            self.ready_since = now

    def move_on(self, prefix: Prefix, accepted: int, now: float) -> bool:
        """Moves to the session's new prefix; returns True if a block for it has already arrived.

        Keeps the block for this prefix and the usable rest of a late block. Drops the others, which assumed another
        verdict or came too late. None can be for a later prefix, because a drafter drafts ahead of one verdict at a
        time. `accepted` is the number of tokens accepted from the verified block, if any; other tokens that are not
        kept count as wasted.
        """
        if not self._unsettled:
            return False
        ready = self._keep(prefix, now)
        left = ready.size if ready is not None else 0
        self._counts.accepted_tokens += accepted
        self._counts.wasted_tokens += self._unsettled - accepted - left
        self._unsettled = left
        return ready is not None

    def leave(self) -> None:
        """Discards all blocks of a session that is over or begins again."""
        self._counts.wasted_tokens += self._unsettled
        self._blocks.clear()
        self._unsettled = 0

    def _keep(self, prefix: Prefix, now: float) -> Block | None:
        """Reduces the buffer to the block for this prefix and returns it, or None."""
        if not self._blocks:
            return None
        address = (prefix.length, prefix.hash)
        ready = self._blocks.pop(address, None)
        late = [block for block in self._blocks.values() if prefix.matches(block.base_len, block.prefix_hash)]
        if len(self._blocks) > len(late):
            self._counts.dropped["wrong_guess"] += len(self._blocks) - len(late)
        self._blocks.clear()
        for block in late:
            rebased = self._rebased(block, prefix)
            if rebased is None:
                self._counts.dropped["late"] += 1
            ready = ready or rebased
        if ready is not None:
            self._blocks[address] = ready
            self.ready_since = now
        return ready

    def _unfit(self, block: Block, request: Open, prefix: Prefix) -> str | None:
        # A verdict commits one token after its block; a block that leaves it no position needs pages past max_len.
        beyond_end = block.base_len + block.size >= request.max_len
        if block.size > request.draft_tokens or beyond_end:
            return "too_long"
        stored = self._blocks.get((block.base_len, block.prefix_hash))
        if stored is not None:
            # A better version replaces a block, except under rejection sampling: there no choice may depend on tokens.
            needs_probs = request.acceptance is Acceptance.REJECTION and not request.sampling.greedy
            return "duplicate" if needs_probs or stored == block else None
        if len(self._blocks) >= self._limit and not _is_for(block, prefix):  # a block for this prefix always fits
            return "buffer_full"
        if block.base_len == prefix.length and block.prefix_hash != prefix.hash:
            return "other_prefix"
        return None

    def _rebased(self, block: Block, prefix: Prefix) -> Block | None:
        """Returns the part of a late block that follows the tokens decided since, or None if no part is usable.

        This is exact under rejection sampling too. Given the committed tokens, the rest is distributed by the
        probabilities that were sent, and neither its use nor its length depends on its tokens.
        """
        if not prefix.matches(block.base_len, block.prefix_hash):
            return None
        rest = block.tree.after(prefix.tokens[block.base_len :])
        if not len(rest):
            return None
        self._counts.rebased += 1
        return Block(block.session, prefix.length, prefix.hash, rest)


def _is_for(block: Block, prefix: Prefix) -> bool:
    """Returns True if the block continues exactly this prefix."""
    return block.base_len == prefix.length and block.prefix_hash == prefix.hash


MAX_ENDED_SESSIONS = 4096  # ended sessions remembered, so that their late blocks are dropped at once


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Bounds on waiting messages."""

    blocks: int = 64  # most blocks per session
    age_s: float = 30.0
    sessions: int = 1024  # most sessions per drafter
    bytes: int = 16 << 20  # most bytes per drafter
    all_bytes: int = 256 << 20  # most bytes over all drafters, since a peer may use many names


@dataclass
class Waiting:
    """Messages of one drafter for one session."""

    since: float
    drafter: str
    attach: Attach | None = None
    blocks: list[Block] = field(default_factory=list)
    bytes: int = 0  # encoded size of `blocks`


class OrphanBuffer:
    """All messages that wait for an Open; drops and counts those beyond the limits and those that expire."""

    def __init__(self, limits: BufferLimits, counts: TargetCounts) -> None:
        self._limits = limits
        self._counts = counts
        self._waiting: OrderedDict[tuple[str, str], Waiting] = OrderedDict()  # by session and drafter, oldest first
        self._drafters: defaultdict[str, list[str]] = defaultdict(list)  # drafters by session, in order of arrival
        self._sessions: defaultdict[str, dict[str, None]] = defaultdict(dict)  # session names by drafter
        self._bytes: Counter[str] = Counter()  # bytes of waiting blocks, by drafter
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
        """Records that a session is over, so that its further blocks are dropped instead of kept for an Open."""
        self._ended[session] = None
        if len(self._ended) > MAX_ENDED_SESSIONS:
            self._ended.popitem(last=False)

    def drafter_gone(self, drafter: str) -> None:
        for session in list(self._sessions.get(drafter, ())):
            self._discard(self._remove(session, drafter), "drafter_gone")

    def next_expiry(self) -> float | None:
        """Returns the time of the next expiry; None if nothing waits."""
        oldest = next(iter(self._waiting.values()), None)
        return oldest.since + self._limits.age_s if oldest is not None else None

    def expire(self, now: float) -> None:
        while (due := self.next_expiry()) is not None and now >= due:
            self._discard(self._remove(*next(iter(self._waiting))), "expired")

    def _place_of(self, session: str, drafter: str, now: float) -> Waiting | None:
        """Returns this drafter's queue for the session, created if needed; None at the drafter's limit of sessions."""
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
