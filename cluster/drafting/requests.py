"""What a drafting method is asked for and what it answers: wants and proposals. Values; they know of nothing else."""

import math

from protos.draft_tree import DraftTree
from protos.messages import Open, Shape
from protos.values import value


@value
class Want:
    """A session that wants a block after `tokens`.

    With `unverified`, a step is under way whose verdict is not in, over these draft tokens or over none: then blocks
    are wanted for what may come of it, one for each likely outcome, and by `until`. A token is not wanted if its chance
    to be accepted, and all before it, is below `least_chance`, as the method sees it, and not under ratio, where a
    block's length may not depend on its tokens.
    """

    open: Open
    tokens: tuple[int, ...]
    prefix_hash: int  # of `tokens`
    max_tokens: int
    unverified: DraftTree | None = None
    until: float = math.inf
    least_chance: float = 0.0
    shape: Shape = Shape.CHAIN  # that the target can verify


@value
class Proposal:
    """A block after `base_len` tokens; no tokens: there is nothing to offer.

    With `outcome`, drafted ahead: it is wanted if the verdict that was not in brings just these tokens, which
    `base_len` and `prefix_hash` include.
    """

    session: str
    base_len: int
    prefix_hash: int
    tree: DraftTree
    outcome: tuple[int, ...] = ()
    is_at_once: bool = False  # made without a forward, so that it says nothing of what drafting costs

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that it offers."""
        return self.tree.tokens


def max_block_len(request: Open, length: int) -> int:
    """Longest block after `length` tokens: a verdict may bring one token more, so the last position needs no draft."""
    return min(request.max_draft_tokens, request.max_len - length - 1)
