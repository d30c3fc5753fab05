"""One session's blocks, from their arrival until a step takes them or the session has passed them by.

A block waits under the length and hash that it was drafted for.
"""

from collections import Counter
from dataclasses import dataclass, field

from protos.messages import Acceptance, Block, Open
from protos.prefix import Prefix


@dataclass(slots=True)
class BlockCounts:
    """What became of all sessions' blocks."""

    dropped: Counter[str] = field(default_factory=Counter)  # that were not verified, by cause
    rebased: int = 0  # that came late and were verified from where the target had got to
    accepted_tokens: int = 0
    wasted_tokens: int = 0  # that came and were not accepted, once that is certain

    def drop(self, cause: str, block: Block) -> None:
        """The block will not be verified."""
        self.dropped[cause] += 1
        self.wasted_tokens += block.size


class BlockBuffer:
    """Blocks by (base_len, prefix_hash); at most `limit` of them."""

    def __init__(self, limit: int, counts: BlockCounts) -> None:
        self.ready_since = 0.0  # when the block that is ready came
        self._limit = limit
        self._counts = counts
        self._blocks: dict[tuple[int, int], Block] = {}
        self._unsettled = 0  # tokens of blocks that were let in, versions replaced since among them

    def ready(self, prefix: Prefix) -> Block | None:
        """The block that may go into a step now."""
        return self._blocks.get((prefix.length, prefix.hash)) if self._blocks else None

    def take(self, base_len: int, prefix_hash: int) -> None:
        """The block for this prefix was verified."""
        del self._blocks[base_len, prefix_hash]

    def place(self, block: Block, request: Open, prefix: Prefix, now: float) -> None:
        """Lets a block wait; one that can never be verified is dropped and counted."""
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
        """Keeps the block for the prefix that the session has now; the others guessed otherwise or came too late.

        What a late one is still good for is kept too. Nothing here can be for a later prefix: a drafter guesses
        at one verdict at a time. `accepted` tokens of the block that was verified, if one was, stand; of what else came
        only what is kept may still. Returns whether there is a block for this prefix already.
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
        """The session is over, or begins anew: what is here will not be verified."""
        self._counts.wasted_tokens += self._unsettled
        self._blocks.clear()
        self._unsettled = 0

    def _keep(self, prefix: Prefix, now: float) -> Block | None:
        """The block for this prefix, now the only one in the buffer."""
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
        # A verdict brings one token more than its block: what would leave no room for it needs pages that nobody has.
        beyond_end = block.base_len + block.size >= request.max_len
        if block.size > request.max_draft_tokens or beyond_end:
            return "too_long"
        known = self._blocks.get((block.base_len, block.prefix_hash))
        if known is not None:
            # A drafter may have thought again; but under ratio which of two is used must not depend on either.
            ratio = request.acceptance is Acceptance.RATIO and not request.sampling.greedy
            return "duplicate" if ratio or known == block else None
        if len(self._blocks) >= self._limit and not _is_for(block, prefix):  # guesses never keep out what is due
            return "buffer_full"
        if block.base_len == prefix.length and block.prefix_hash != prefix.hash:
            return "other_prefix"
        return None

    def _rebased(self, block: Block, prefix: Prefix) -> Block | None:
        """What a block that comes too late is still good for: what it has after the tokens decided since.

        Exact under ratio too: given the tokens decided, the rest follows the probabilities sent, and neither whether
        nor at what length it is used depends on the rest.
        """
        if not prefix.matches(block.base_len, block.prefix_hash):
            return None
        rest = block.tree.after(prefix.tokens[block.base_len :])
        if not len(rest):
            return None
        self._counts.rebased += 1
        return Block(block.session, prefix.length, prefix.hash, rest)


def _is_for(block: Block, prefix: Prefix) -> bool:
    """Whether the block continues just this prefix."""
    return block.base_len == prefix.length and block.prefix_hash == prefix.hash
