"""Buffers for draft blocks that wait for a step, and for messages that precede their session's Open.

Waiting blocks are indexed by length and prefix hash. A drafter may receive a session's Open before the target does.
Until the target receives the Open, it does not know the assigned drafter, so it buffers messages per drafter, with
limits on number, bytes and age. Every operation takes constant time per message.
"""

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field, replace

from protos.codec import encoded_bytes
from protos.messages import Attach, Block, Open
from protos.prefix import Prefix


@dataclass(slots=True)
class TargetCounts:
    """Totals of one target replica since startup."""

    dropped: Counter[str] = field(default_factory=Counter)  # unverified blocks, by cause
    unrequested: int = 0  # blocks for unopened sessions or from drafters that are not assigned
    rebased: int = 0  # late blocks reused from the target's current length on
    accepted_tokens: int = 0  # accepted draft tokens
    wasted_tokens: int = 0  # draft tokens of well-formed blocks, once certain not to be accepted
    known_tokens: int = 0  # committed tokens fed, including recomputed ones
    step_s: float = 0.0  # total seconds in steps
    idle_s: float = 0.0  # total seconds with sessions but without a step, usually waiting for blocks
    nonfinite: int = 0  # sessions ended by NaN or infinite logits

    def drop(self, cause: str, block: Block) -> None:
        """Counts a block that will not be verified."""
        self.dropped[cause] += 1
        self.wasted_tokens += block.size


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits on waiting messages."""

    blocks: int = 64  # maximum blocks per session
    age_s: float = 30.0
    sessions: int = 1024  # maximum sessions per drafter
    bytes: int = 16 << 20  # maximum bytes per drafter before sessions open, and per opened session
    all_bytes: int = 256 << 20  # maximum bytes over all drafters, because a peer may use many names


class BlockBuffer:
    """Waiting blocks of one session, by (base_len, prefix_hash)."""

    def __init__(self, limits: BufferLimits, counts: TargetCounts) -> None:
        self.ready: Block | None = None  # block for exactly the session's prefix
        self._limits = limits
        self._counts = counts
        self._blocks: dict[tuple[int, int], Block] = {}  # blocks for later prefixes
        self._probs_bytes = 0  # encoded size of those with probabilities
        self._unsettled = 0  # stored tokens, including replaced versions, not yet counted as accepted or wasted

    def take(self) -> None:
        """Removes the ready block, which was verified."""
        assert self.ready is not None, "no block is ready"
        self.ready = None

    def place(self, block: Block, request: Open, prefix: Prefix) -> None:
        """Stores a block until its prefix is decided; drops and counts a block that can never be verified.

        Draft probabilities, by far the largest part, are kept only for rejection sampling.
        """
        if block.tree.probs is not None and not request.uses_draft_probs:
            block = replace(block, tree=replace(block.tree, probs=None))
        if block.base_len < prefix.length:
            late = block
            block = self._rebased(block, prefix) or block
            if block is late:
                self._counts.drop("stale", block)
                return
            self._counts.wasted_tokens += late.size - block.size
        if cause := self._rejection_reason(block, request, prefix):
            self._counts.drop(cause, block)
            return
        self._unsettled += block.size
        if _is_for(block, prefix):
            self.ready = block
        else:
            self._blocks[block.base_len, block.prefix_hash] = block
            self._probs_bytes += encoded_bytes(block) if block.tree.probs is not None else 0

    def advance_to(self, prefix: Prefix, accepted: int) -> bool:
        """Advances to the session's new prefix; returns True if its block has already arrived.

        Keeps the block for this prefix and the usable rest of a late block. Drops all others, which assumed another
        verdict or arrived too late. No block can be for a later prefix, because a drafter drafts ahead of only one
        verdict at a time. `accepted` is the number of accepted tokens of the verified block; tokens neither accepted
        nor kept count as wasted.
        """
        if not self._unsettled:
            return False
        self.ready = ready = self._keep(prefix)
        left = ready.size if ready is not None else 0
        self._counts.accepted_tokens += accepted
        self._counts.wasted_tokens += self._unsettled - accepted - left
        self._unsettled = left
        return ready is not None

    def leave(self) -> None:
        """Discards all blocks of a session that has ended or is reopened."""
        self._counts.wasted_tokens += self._unsettled
        self._blocks.clear()
        self.ready = None
        self._unsettled = 0

    def _keep(self, prefix: Prefix) -> Block | None:
        """Reduces the buffer to the block for this prefix, and returns the block or None."""
        ready = self._blocks.pop((prefix.length, prefix.hash), None) if self._blocks else None
        self._probs_bytes = 0
        if self.ready is not None or self._blocks:  # rare: a block that was not verified, or drafted for other outcomes
            others = [*self._blocks.values(), *([self.ready] if self.ready is not None else [])]
            self._blocks.clear()
            late = [block for block in others if prefix.matches(block.base_len, block.prefix_hash)]
            if len(others) > len(late):
                self._counts.dropped["wrong_guess"] += len(others) - len(late)
            for block in late:
                rebased = self._rebased(block, prefix)
                if rebased is None:
                    self._counts.dropped["late"] += 1
                ready = ready or rebased
        return ready

    def _rejection_reason(self, block: Block, request: Open, prefix: Prefix) -> str | None:
        # A verdict commits one token after the block. A block without space for that token would need pages beyond
        # max_len.
        beyond_end = block.base_len + block.size >= request.max_len
        if block.size > request.draft_tokens or beyond_end:
            return "too_long"
        is_current = _is_for(block, prefix)
        stored = self.ready if is_current else self._blocks.get((block.base_len, block.prefix_hash))
        if stored is not None:
            # A newer version replaces a block, except under rejection sampling, where the choice must not depend on
            # tokens.
            return "duplicate" if request.uses_draft_probs or stored == block else None
        is_full = len(self._blocks) >= self._limits.blocks or self._probs_bytes > self._limits.bytes
        if is_full and not is_current:  # the current block always fits
            return "buffer_full"
        if block.base_len == prefix.length and not is_current:
            return "other_prefix"
        return None

    def _rebased(self, block: Block, prefix: Prefix) -> Block | None:
        """Returns the part of a late block after the newly committed tokens, or None if no part is usable.

        This remains exact under rejection sampling. Given the committed tokens, the rest is still distributed according
        to draft_probs, and neither its use nor its length depends on its tokens.
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


MAX_ENDED_SESSIONS = 4096  # number of ended sessions kept, to drop their late blocks at once


@dataclass
class Waiting:
    """Buffered messages of one drafter for one session."""

    since: float
    drafter: str
    attach: Attach | None = None
    blocks: list[Block] = field(default_factory=list)
    bytes: int = 0  # encoded size of `blocks`


class OrphanBuffer:
    """Messages that precede their session's Open; drops and counts messages that exceed the limits or expire."""

    def __init__(self, limits: BufferLimits, counts: TargetCounts) -> None:
        self._limits = limits
        self._counts = counts
        self._waiting: OrderedDict[tuple[str, str], Waiting] = OrderedDict()  # by (session, drafter), oldest first
        self._drafters: defaultdict[str, list[str]] = defaultdict(list)  # drafters by session, in order of arrival
        self._sessions: defaultdict[str, dict[str, None]] = defaultdict(dict)  # session names by drafter
        self._bytes: Counter[str] = Counter()  # bytes of waiting blocks, by drafter
        self._all_bytes = 0
        self._ended: OrderedDict[str, None] = OrderedDict()  # recently ended sessions

    def __len__(self) -> int:
        return len(self._waiting)

    def attach(self, drafter: str, attach: Attach, now: float) -> None:
        if waiting := self._place_of(attach.session, drafter, now):
            waiting.attach = attach

    def detach(self, drafter: str, session: str) -> None:
        """Drops the Attach of a drafter that left the session before its Open arrived, or after its end.

        Blocks stay valid unless the session has ended.
        """
        waiting = self._waiting.get((session, drafter))
        if waiting is None:
            return
        waiting.attach = None
        if not waiting.blocks or session in self._ended:
            self._discard(self._remove(session, drafter), "ended")

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
        """Removes and returns the messages of a newly opened session, by drafter, in order of arrival."""
        self._ended.pop(session, None)
        return [self._remove(session, drafter) for drafter in list(self._drafters.get(session, ()))]

    def ended(self, session: str) -> None:
        """Records the end of a session, so that its late blocks are dropped instead of buffered."""
        self._ended[session] = None
        if len(self._ended) > MAX_ENDED_SESSIONS:
            self._ended.popitem(last=False)

    def drafter_gone(self, drafter: str) -> None:
        for session in list(self._sessions.get(drafter, ())):
            self._discard(self._remove(session, drafter), "drafter_gone")

    def next_expiry(self) -> float | None:
        """Returns the time of the next expiry; None if the buffer is empty."""
        oldest = next(iter(self._waiting.values()), None)
        return oldest.since + self._limits.age_s if oldest is not None else None

    def expire(self, now: float) -> None:
        while (due := self.next_expiry()) is not None and now >= due:
            self._discard(self._remove(*next(iter(self._waiting))), "expired")

    def _place_of(self, session: str, drafter: str, now: float) -> Waiting | None:
        """Returns the drafter's queue for the session, created if needed; None if the drafter has reached its session
        limit.
        """
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
        """Removes a queue from all indices, and index entries that become empty."""
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
