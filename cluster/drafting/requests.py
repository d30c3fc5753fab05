"""What a drafting method is asked for ahead of verdicts, and what it answers. Values; they know of nothing else.

What it is asked for now is the target's own `protos.messages.DraftRequest`.
"""

import math
from collections.abc import Sequence
from dataclasses import field

from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Open, Shape
from protos.values import value


@value
class AheadRequest:
    """A session with a step under way, over the draft tokens `unverified` or over none, whose verdict is not in.

    Blocks are wanted for what may come of it, one for each likely outcome, and by `until`. A token is not wanted if its
    chance to be accepted, and all before it, is below `least_chance`, as the method sees it, and not under ratio, where
    a block's length may not depend on its tokens.
    """

    session: str
    base_len: int  # tokens before the step
    prefix_hash: int  # of them
    max_tokens: int  # of each block
    unverified: DraftTree
    until: float = math.inf
    least_chance: float = 0.0
    shape: Shape = Shape.CHAIN  # that the target can verify
    chances: tuple[float, ...] = field(default=(), compare=False)  # of the draft tokens, each with all before it

    def claim(self, path: tuple[int, ...]) -> float:
        """Chance of the last of these draft tokens if those before it stand, as its drafter saw it; 0 if unknown."""
        nodes = self.unverified.along(path)
        if not self.chances or len(nodes) < len(path):
            return 0.0
        before = self.chances[nodes[-2]] if len(nodes) > 1 else 1.0
        return self.chances[nodes[-1]] / before if before else 0.0


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
    confidence: float | None = field(
        default=None, compare=False
    )  # of the first token, if the draft can be judged by it
    chances: tuple[float, ...] = field(
        default=(), compare=False
    )  # of its tokens, each with all before it; not of ratio's
    chance: float = field(default=1.0, compare=False)  # that the outcome comes

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that it offers."""
        return self.tree.tokens


def nothing_ahead(requests: Sequence[AheadRequest]) -> list[Proposal]:
    """Of a method that has nothing ahead of these verdicts.

    A target that goes on without a block is told so, or it would take the drafter for silent; one that verifies a block
    has heard of it.
    """
    waiting = [request for request in requests if not len(request.unverified)]
    return [Proposal(each.session, each.base_len, each.prefix_hash, NO_TREE) for each in waiting]


def max_block_len(request: Open, length: int) -> int:
    """Longest block after `length` tokens: a verdict may bring one token more, so the last position needs no draft."""
    return min(request.max_draft_tokens, request.max_len - length - 1)
