"""Values exchanged with a drafting method: requests, proposals, and session updates.

The target's `protos.messages.DraftRequest` requests a block that is needed now; a `LookaheadRequest` requests blocks
for likely verdicts. The method returns one `Proposal` per block.

A method runs on its own thread with its own copy of every session's text (`SessionText`). Each pass first applies the
updates since the previous pass (`SessionUpdates`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from protos.draft_tree import NO_TREE, DraftTree
from protos.frozen import value
from protos.messages import Open, Shape


@value
class LookaheadRequest:
    """Requests blocks ahead of the verdict on a session's current step. The step verifies `unverified`, which may be
    empty.

    The method drafts one block per likely outcome of the step, and finishes by `until`. It omits tokens with an
    estimated cumulative acceptance probability below `least_chance`. Under rejection sampling it ignores
    `least_chance`, because a block's length must not depend on its tokens.
    """

    session: str
    base_len: int  # number of tokens before the step
    prefix_hash: int  # hash of the tokens before the step
    max_tokens: int  # maximum number of draft tokens per block
    unverified: DraftTree
    until: float = math.inf
    least_chance: float = 0.0
    shape: Shape = Shape.CHAIN  # block shape supported by the target
    chances: tuple[float, ...] = field(default=(), compare=False)  # cumulative, per node of `unverified`

    def conditional_chance(self, path: tuple[int, ...]) -> float:
        """Returns the drafter's conditional probability of the path's last token; 0 if unknown."""
        nodes = self.unverified.along(path)
        if not self.chances or len(nodes) < len(path):
            return 0.0
        before = self.chances[nodes[-2]] if len(nodes) > 1 else 1.0
        return self.chances[nodes[-1]] / before if before else 0.0


@value
class Proposal:
    """A block that continues the first `base_len` tokens; may be empty.

    A block with an `outcome` was drafted ahead. It is usable only if the pending verdict commits exactly these tokens,
    which `base_len` and `prefix_hash` include.
    """

    session: str
    base_len: int
    prefix_hash: int
    tree: DraftTree
    outcome: tuple[int, ...] = ()
    is_at_once: bool = False  # drafted without a forward pass; its time does not measure drafting cost
    confidence: float | None = field(
        default=None, compare=False
    )  # probability of the first token, if comparable with the target's decision
    chances: tuple[float, ...] = field(
        default=(), compare=False
    )  # cumulative acceptance probability per token; empty under rejection sampling
    chance: float = field(default=1.0, compare=False)  # estimated probability of `outcome`

    @property
    def tokens(self) -> tuple[int, ...]:
        """All draft tokens."""
        return self.tree.tokens


def empty_proposals(requests: Sequence[LookaheadRequest]) -> list[Proposal]:
    """Returns empty proposals for the requests that need an answer although the method has no block.

    If the target's step has no block, an empty proposal keeps the target from counting the drafter as silent. A step
    that verifies a block has its answer already.
    """
    waiting = [request for request in requests if not len(request.unverified)]
    return [Proposal(each.session, each.base_len, each.prefix_hash, NO_TREE) for each in waiting]


def with_empty_proposals(proposals: list[Proposal], requests: Sequence[LookaheadRequest]) -> list[Proposal]:
    """Appends empty proposals for the sessions that need an answer but have no proposal."""
    served = {proposal.session for proposal in proposals}
    return proposals + empty_proposals([request for request in requests if request.session not in served])


def max_draft_tokens(request: Open, length: int) -> int:
    """Returns the maximum useful block length after `length` tokens.

    A verdict can commit one token more than the block, so the last position needs no draft.
    """
    return min(request.draft_tokens, request.max_len - length - 1)


@dataclass(slots=True)
class SessionUpdates:
    """Session updates since the previous pass, to be applied in this order: closed, opened, committed, states.

    The scheduler accumulates updates until the next pass.
    """

    closed: dict[str, None] = field(default_factory=dict)  # session names (ordered set)
    opened: dict[str, Open] = field(default_factory=dict)
    committed: dict[str, list[int]] = field(default_factory=dict)  # new tokens by session
    states: dict[str, tuple[int, list[bytes]]] = field(default_factory=dict)  # (first position, rows) by session

    def open(self, request: Open) -> None:
        self.opened[request.session] = request

    def commit(self, session: str, tokens: Sequence[int]) -> None:
        self.committed.setdefault(session, []).extend(tokens)

    def add_states(self, session: str, first: int, rows: bytes) -> None:
        """Adds hidden states that continue the session's earlier ones; `first` is the position of the first row."""
        self.states.setdefault(session, (first, []))[1].append(rows)

    def close(self, session: str) -> None:
        """Records the end of a session and drops its other pending updates."""
        self.opened.pop(session, None)
        self.committed.pop(session, None)
        self.states.pop(session, None)
        self.closed[session] = None

    def take(self) -> "SessionUpdates":
        """Returns and clears all pending updates."""
        pending = replace(self)
        self.closed, self.opened, self.committed, self.states = {}, {}, {}, {}
        return pending


@dataclass(frozen=True, slots=True, eq=False)
class SessionText:
    """The committed text of a session; it grows in place."""

    open: Open
    tokens: list[int]  # committed tokens, prompt included

    @classmethod
    def begin(cls, request: Open) -> "SessionText":
        return cls(request, list(request.tokens))
