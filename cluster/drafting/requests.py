"""Values exchanged with a drafting method: requests, proposals, and changes to sessions.

The target's own `protos.messages.DraftRequest` requests a block that is needed now; a `LookaheadRequest` requests
blocks for the likely outcomes of a verdict. The method answers both with a `Proposal` per block.

A method runs on its own thread and keeps its own copy of every text (`SessionText`). Each pass starts by applying the
changes since the previous one (`SessionUpdates`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from protos.draft_tree import NO_TREE, DraftTree
from protos.frozen import value
from protos.messages import Open, Shape


@value
class LookaheadRequest:
    """Requests blocks ahead of the verdict on a session's current step, which verifies `unverified`, possibly empty.

    The method drafts one block for each likely outcome of the step, and finishes by `until`. It omits tokens whose
    cumulative acceptance probability, by its own estimate, is below `least_chance`. Under rejection sampling it omits
    none, because there a block's length must not depend on its tokens.
    """

    session: str
    base_len: int  # number of tokens before the step
    prefix_hash: int  # hash of the tokens before the step
    max_tokens: int  # most draft tokens per block
    unverified: DraftTree
    until: float = math.inf
    least_chance: float = 0.0
    shape: Shape = Shape.CHAIN  # block shape that the target can verify
    chances: tuple[float, ...] = field(default=(), compare=False)  # cumulative acceptance probability per draft token

    def claim(self, path: tuple[int, ...]) -> float:
        """Returns the drafter's probability of the path's last token given the tokens before it; 0 if unknown."""
        nodes = self.unverified.along(path)
        if not self.chances or len(nodes) < len(path):
            return 0.0
        before = self.chances[nodes[-2]] if len(nodes) > 1 else 1.0
        return self.chances[nodes[-1]] / before if before else 0.0


@value
class Proposal:
    """A block that follows `base_len` tokens; empty if the method has nothing to offer.

    A block with an `outcome` was drafted ahead: it is usable only if the pending verdict commits exactly these tokens.
    `base_len` and `prefix_hash` include them.
    """

    session: str
    base_len: int
    prefix_hash: int
    tree: DraftTree
    outcome: tuple[int, ...] = ()
    is_at_once: bool = False  # made without a forward pass, so its time does not measure drafting cost
    confidence: float | None = field(
        default=None, compare=False
    )  # probability of the first token, if it can be compared with the target's decision
    chances: tuple[float, ...] = field(
        default=(), compare=False
    )  # cumulative acceptance probability per token; empty under rejection sampling
    chance: float = field(default=1.0, compare=False)  # estimated probability of the outcome

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens offered."""
        return self.tree.tokens


def nothing_ahead(requests: Sequence[LookaheadRequest]) -> list[Proposal]:
    """Returns the empty proposals of a method that has no blocks ahead of these verdicts.

    A target that continues without a block is answered with an empty proposal, or it would count the drafter as silent.
    A target that is verifying a block has had an answer already.
    """
    waiting = [request for request in requests if not len(request.unverified)]
    return [Proposal(each.session, each.base_len, each.prefix_hash, NO_TREE) for each in waiting]


def with_empty(proposals: list[Proposal], requests: Sequence[LookaheadRequest]) -> list[Proposal]:
    """Returns the proposals, followed by those of `nothing_ahead` for sessions without any."""
    served = {proposal.session for proposal in proposals}
    return proposals + nothing_ahead([request for request in requests if request.session not in served])


def max_draft_tokens(request: Open, length: int) -> int:
    """Returns the length of the longest useful block after `length` tokens.

    A verdict may commit one token more than the block, so the last position needs no draft.
    """
    return min(request.draft_tokens, request.max_len - length - 1)


@dataclass(slots=True)
class SessionUpdates:
    """Changes to sessions since the previous pass, to be applied in this order: closed, opened, committed, states.

    The scheduler adds changes until a pass takes them.
    """

    closed: dict[str, None] = field(default_factory=dict)  # session names; an ordered set
    opened: dict[str, Open] = field(default_factory=dict)
    committed: dict[str, list[int]] = field(default_factory=dict)  # new tokens by session
    states: dict[str, tuple[int, list[bytes]]] = field(default_factory=dict)  # position of the first row, and the rows

    def open(self, request: Open) -> None:
        self.opened[request.session] = request

    def commit(self, session: str, tokens: Sequence[int]) -> None:
        self.committed.setdefault(session, []).extend(tokens)

    def add_states(self, session: str, first: int, rows: bytes) -> None:
        """Adds hidden states that follow the session's previous ones; `first` is the position of the first row."""
        self.states.setdefault(session, (first, []))[1].append(rows)

    def close(self, session: str) -> None:
        """Records that a session ended and drops its other pending changes."""
        self.opened.pop(session, None)
        self.committed.pop(session, None)
        self.states.pop(session, None)
        self.closed[session] = None

    def take(self) -> "SessionUpdates":
        """Returns all pending changes and clears them."""
        pending = replace(self)
        self.closed, self.opened, self.committed, self.states = {}, {}, {}, {}
        return pending


@dataclass(frozen=True, slots=True, eq=False)
class SessionText:
    """One session's committed text; it grows in place."""

    open: Open
    tokens: list[int]  # committed tokens, prompt included

    @classmethod
    def begin(cls, request: Open) -> "SessionText":
        return cls(request, list(request.tokens))
