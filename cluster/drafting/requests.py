"""Values exchanged with a drafting method: requests, proposals, and changes to sessions.

The target's own `protos.messages.DraftRequest` requests a block that is needed now; an `AheadRequest` requests blocks
for the likely outcomes of a verdict. The method answers both with a `Proposal` per block.

A method runs on its own thread and keeps its own copy of every text (`SessionTexts`). `UpdateCollector` gathers the
changes between two passes, and each pass starts by applying them as `SessionUpdates`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.draft_tree import NO_TREE, DraftTree
from protos.frozen import value
from protos.messages import Open, Shape


@value
class AheadRequest:
    """A session whose current step, with the draft tokens `unverified` or none, has no verdict yet.

    The method drafts one block for each likely outcome of the step, and finishes by `until`. It omits tokens whose
    cumulative acceptance probability, by its own estimate, is below `least_chance`. Under rejection sampling it omits
    none, because there a block's length must not depend on its tokens.
    """

    session: str
    base_len: int  # tokens before the step
    prefix_hash: int  # hash of those tokens
    max_tokens: int  # per block
    unverified: DraftTree
    until: float = math.inf
    least_chance: float = 0.0
    shape: Shape = Shape.CHAIN  # shape that the target can verify
    chances: tuple[float, ...] = field(default=(), compare=False)  # cumulative, one for each draft token

    def claim(self, path: tuple[int, ...]) -> float:
        """Returns the drafter's probability of the path's last token given the tokens before it; 0 if unknown."""
        nodes = self.unverified.along(path)
        if not self.chances or len(nodes) < len(path):
            return 0.0
        before = self.chances[nodes[-2]] if len(nodes) > 1 else 1.0
        return self.chances[nodes[-1]] / before if before else 0.0


@value
class Proposal:
    """A block to follow `base_len` tokens; without tokens, the method has nothing to offer.

    With `outcome`, the block was drafted ahead: it is wanted only if the pending verdict brings exactly these tokens.
    `base_len` and `prefix_hash` include them.
    """

    session: str
    base_len: int
    prefix_hash: int
    tree: DraftTree
    outcome: tuple[int, ...] = ()
    is_at_once: bool = False  # made without a forward pass, so its time is no measure of drafting cost
    confidence: float | None = field(
        default=None, compare=False
    )  # probability of the first token, if it can be compared with what the target decides
    chances: tuple[float, ...] = field(
        default=(), compare=False
    )  # cumulative, one for each token; empty under rejection sampling
    chance: float = field(default=1.0, compare=False)  # probability of the outcome

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens offered."""
        return self.tree.tokens


def nothing_ahead(requests: Sequence[AheadRequest]) -> list[Proposal]:
    """Returns the answer of a method that has no blocks ahead of these verdicts.

    A target that continues without a block is answered with an empty proposal, or it would count the drafter as silent.
    A target that is verifying a block has had an answer already.
    """
    waiting = [request for request in requests if not len(request.unverified)]
    return [Proposal(each.session, each.base_len, each.prefix_hash, NO_TREE) for each in waiting]


def with_empty(proposals: list[Proposal], requests: Sequence[AheadRequest]) -> list[Proposal]:
    """Returns the proposals, followed by the answers of `nothing_ahead` for sessions without one."""
    served = {proposal.session for proposal in proposals}
    return proposals + nothing_ahead([request for request in requests if request.session not in served])


def max_block_len(request: Open, length: int) -> int:
    """Returns the length of the longest useful block after `length` tokens.

    A verdict may bring one token more than the block, so the last position needs no draft.
    """
    return min(request.draft_tokens, request.max_len - length - 1)


@value
class SessionUpdates:
    """Changes to sessions since the previous pass, to be applied in this order: closed, opened, committed, states."""

    closed: tuple[str, ...] = ()
    opened: tuple[Open, ...] = ()
    committed: tuple[tuple[str, tuple[int, ...]], ...] = ()  # session, and the tokens that follow those known
    states: tuple[tuple[str, int, bytes], ...] = ()  # session, and the target's hidden states from this position on


class UpdateCollector:
    """Changes that no pass has taken yet."""

    def __init__(self) -> None:
        self._closed: dict[str, None] = {}  # an ordered set
        self._opened: dict[str, Open] = {}
        self._committed: dict[str, list[int]] = {}
        self._states: dict[str, tuple[int, list[bytes]]] = {}

    @property
    def has_states(self) -> bool:
        """True if hidden states have arrived; a method may process them while it is idle."""
        return bool(self._states)

    @property
    def has_closed(self) -> bool:
        """True if sessions have ended, so that a method could free their caches."""
        return bool(self._closed)

    def opened(self, request: Open) -> None:
        self._opened[request.session] = request

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._committed.setdefault(session, []).extend(tokens)

    def states(self, session: str, first: int, rows: bytes) -> None:
        """Adds the rows that follow the session's previous ones; `first` is the position of the first row."""
        self._states.setdefault(session, (first, []))[1].append(rows)

    def closed(self, session: str) -> None:
        """Records that a session ended and drops its other pending changes."""
        self._opened.pop(session, None)
        self._committed.pop(session, None)
        self._states.pop(session, None)
        self._closed[session] = None

    def take(self) -> SessionUpdates:
        """Returns all pending changes and clears them."""
        committed = tuple([(session, tuple(tokens)) for session, tokens in self._committed.items()])
        states = tuple([(session, first, b"".join(rows)) for session, (first, rows) in self._states.items()])
        updates = SessionUpdates(tuple(self._closed), tuple(self._opened.values()), committed, states)
        self._closed.clear()
        self._opened.clear()
        self._committed.clear()
        self._states.clear()
        return updates


@dataclass(frozen=True, slots=True, eq=False)
class SessionText:
    """One session's committed text; it grows in place."""

    open: Open
    tokens: list[int]  # prompt included


class SessionTexts:
    """Texts of all open sessions."""

    def __init__(self) -> None:
        self._all: dict[str, SessionText] = {}

    def __contains__(self, session: str) -> bool:
        return session in self._all

    @property
    def is_empty(self) -> bool:
        return not self._all

    def __getitem__(self, session: str) -> SessionText:
        return self._all[session]

    def open(self, request: Open) -> None:
        self._all[request.session] = SessionText(request, list(request.tokens))

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._all[session].tokens.extend(tokens)

    def close(self, sessions: Sequence[str]) -> None:
        """Forgets sessions; ignores unknown ones."""
        for session in sessions:
            self._all.pop(session, None)
