"""Interface between a target's coordinator and its engine: step plans and outcomes.

A step takes one message in each direction. This module does not import torch; the engine converts plans to tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.page_allocator import PageCopy, SlotMove
from protos.draft_tree import NO_TREE, DraftTree
from protos.frozen import value
from protos.messages import Open, TokenScore


class StepEngine(Protocol):
    """Executes step plans, one at a time."""

    def step(self, plan: "StepPlan") -> "list[Outcome]":
        """Returns one outcome per deciding row, in order."""
        ...


def slots_of(positions: Iterable[int], pages: Sequence[int], page_size: int) -> list[int]:
    """Returns the cache slots of a session's positions; `pages` is the session's page table."""
    return [pages[at // page_size] * page_size + at % page_size for at in positions]


@value
class Row:
    """The tokens of one session to feed in a step.

    `tokens` continue the session's first `start` tokens, which are cached. With `decide`, the row ends with the nodes
    of `draft`, which the engine verifies before it draws one further token. Without `decide`, the row only fills the
    cache, as a chunk of a long prompt does. `pages` is the session's page table up to the row's end.
    """

    session: str
    tokens: tuple[int, ...]
    start: int
    decide: bool
    pages: tuple[int, ...]
    draft: DraftTree = NO_TREE
    state_slots: tuple[int, ...] = ()  # slots of the last positions with requested hidden states

    @property
    def drafted(self) -> int:
        """Number of draft tokens."""
        return len(self.draft.tokens)

    @property
    def deciding(self) -> int:
        """Number of positions with required logits: after the last committed token, and after each draft token."""
        return len(self.draft.tokens) + 1 if self.decide else 0

    @property
    def known(self) -> int:
        """Number of committed tokens in the row."""
        return len(self.tokens) - len(self.draft.tokens)

    @property
    def feeds_prompt(self) -> bool:
        """True if the row feeds part of the prompt."""
        return self.known > 1 or not self.decide

    @property
    def base_len(self) -> int:
        """Number of committed tokens before the step, cached ones included."""
        return self.start + self.known

    @property
    def states_from(self) -> int:
        """First position whose hidden states the outcome should contain."""
        return self.start + len(self.tokens) - len(self.state_slots)

    def states_along(self, path: Sequence[int]) -> list[int]:
        """Returns the slots of the outcome's states, in order, if the nodes on `path` are accepted."""
        known_slots = len(self.state_slots) - self.drafted
        return [*self.state_slots[:known_slots], *[self.state_slots[known_slots + node] for node in path]]

    def moves_along(self, path: Sequence[int], page_size: int) -> list[SlotMove]:
        """Returns the slot moves that place the nodes of a path directly after the committed tokens."""
        if not path or path[-1] == len(path) - 1:
            return []  # the accepted nodes are already in place
        slots = slots_of(range(self.base_len, self.base_len + path[-1] + 1), self.pages, page_size)
        return [SlotMove(slots[node], slots[step]) for step, node in enumerate(path) if node != step]


@value
class StepPlan:
    """One step, executed in this order: close sessions, open sessions, move slots, copy pages, run one forward pass."""

    closes: tuple[str, ...]
    opens: tuple[Open, ...]
    rows: tuple[Row, ...]
    copies: tuple[PageCopy, ...] = ()  # executed after all slot moves
    moves: tuple[SlotMove, ...] = ()  # moves of the previous step's accepted nodes


@value
class StateRead:
    """Hidden states to read from the cache, from position `first` of a session on."""

    session: str
    first: int
    slots: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.slots)


@value
class Outcome:
    """The result of one deciding row: the draft nodes on `path` are accepted, followed by `next_token`.

    If `is_finite` is False, the row's logits were NaN or infinite, and no token is decided. A draft may be the cause,
    so the row is computed again without it. Without a draft, the session must end.
    """

    session: str
    path: tuple[int, ...]
    next_token: int
    margin: float | None = None  # logit lead over the rival token of the session's Open
    states: bytes = b""  # states of the row's `state_slots`, without off-path nodes
    scores: tuple[TokenScore, ...] = ()  # scores of the committed tokens, if requested by the session's Open
    prompt_scores: tuple[TokenScore, ...] = ()  # scores of the prompt from its second token; only in the first outcome
    is_finite: bool = True

    @property
    def has_only_tokens(self) -> bool:
        """True if the outcome has only tokens."""
        extras = self.states or self.scores or self.prompt_scores
        return self.is_finite and self.margin is None and not extras

    @property
    def token_count(self) -> int:
        """Number of committed tokens."""
        return len(self.path) + 1 if self.is_finite else 0

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.path)

    def tokens_of(self, row: Row) -> tuple[int, ...]:
        """Returns the committed tokens: the accepted tokens and the next token."""
        tokens = row.draft.tokens
        return (*[tokens[node] for node in self.path], self.next_token)


def with_states_of_rows(
    rows: Sequence[Row], outcomes: Sequence[Outcome], read: Callable[[list[int]], bytes]
) -> list[Outcome]:
    """Returns the outcomes with the hidden states of their rows' `state_slots`; reads all states in a single call.

    Rows and outcomes correspond one to one, in order.
    """
    if not any(row.state_slots for row in rows):
        return list(outcomes)
    slots = [
        row.states_along(outcome.path) if row.state_slots else [] for row, outcome in zip(rows, outcomes, strict=True)
    ]
    states = read([slot for each in slots for slot in each])
    row_bytes = len(states) // max(1, sum(map(len, slots)))
    results = []
    at = 0
    for outcome, each in zip(outcomes, slots, strict=True):
        end = at + row_bytes * len(each)
        results.append(replace(outcome, states=states[at:end]))
        at = end
    return results
