"""One session's draft blocks, from their arrival until a step takes them or the session has moved past them.

A block waits under the length and prefix hash that it was drafted for.
"""

from collections import Counter
from dataclasses import dataclass, field

from protos.messages import Acceptance, Block, Open
from protos.prefix import Prefix


@dataclass(slots=True)
class BlockCounts:
    """Counts of what became of all sessions' blocks."""

    dropped: Counter[str] = field(default_factory=Counter)  # blocks that were not verified, by cause
    rebased: int = 0  # late blocks that were verified from the target's current length
    accepted_tokens: int = 0
    wasted_tokens: int = 0  # tokens that arrived and were not accepted, once that is certain

    def drop(self, cause: str, block: Block) -> None:
        """Counts a block that will not be verified."""
        self.dropped[cause] += 1
        self.wasted_tokens += block.size


class BlockBuffer:
    """Blocks by (base_len, prefix_hash); at most `limit` of them."""

    def __init__(self, limit: int, counts: BlockCounts) -> None:
        self.ready_since = 0.0  # arrival time of the block that is ready
        self._limit = limit
        self._counts = counts
        self._blocks: dict[tuple[int, int], Block] = {}
        self._unsettled = 0  # tokens of blocks stored so far, including replaced versions

    def ready(self, prefix: Prefix) -> Block | None:
        """Returns the block that may go into a step now, or None."""
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
        """Moves to the session's new prefix; returns True if a block for it is there already.

        Keeps the block for this prefix and the usable rest of a late block. Drops the others, which assumed another
        verdict or came too late. None can be for a later prefix, because a drafter drafts ahead of one verdict at a
        time. `accepted` is the number of tokens accepted from the block that was verified, if any; of the rest only
        what is kept may still count.
        """
        if not self._unsettled:
            return False
        kept = self._keep(prefix, now)
        left = kept.size if kept is not None else 0
        self._counts.accepted_tokens += accepted
        self._counts.wasted_tokens += self._unsettled - accepted - left
        self._unsettled = left
        return kept is not None

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
        # A verdict brings one token more than its block; a block that leaves no place for it needs pages past max_len.
        beyond_end = block.base_len + block.size >= request.max_len
        if block.size > request.max_draft_tokens or beyond_end:
            return "too_long"
        known = self._blocks.get((block.base_len, block.prefix_hash))
        if known is not None:
            # A drafter may send a better version. Under rejection sampling, the choice must not depend on either one.
            ratio = request.acceptance is Acceptance.RATIO and not request.sampling.greedy
            return "duplicate" if ratio or known == block else None
        if len(self._blocks) >= self._limit and not _is_for(block, prefix):  # drafts ahead never displace it
            return "buffer_full"
        if block.base_len == prefix.length and block.prefix_hash != prefix.hash:
            return "other_prefix"
        return None

    def _rebased(self, block: Block, prefix: Prefix) -> Block | None:
        """Returns the part of a late block that follows the tokens decided since, or None if nothing of it is usable.

        This is exact under rejection sampling too. Given the decided tokens, the rest follows the probabilities that
        were sent, and neither its use nor its length depends on its tokens.
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
