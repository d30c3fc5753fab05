"""The interface between a target's coordinator and its engine: a step plan, answered with its outcomes.

A step takes one message in each direction. This module does not import torch; the engine turns the plan into tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.page_allocator import PageCopy, SlotMove
from protos.draft_tree import NO_TREE, DraftTree
from protos.frozen import value
from protos.messages import Open, TokenScore


class StepEngine(Protocol):
    """Computes step plans, one at a time."""

    def step(self, plan: "StepPlan") -> "list[Outcome]":
        """Returns one outcome for each row that decides, in order."""
        ...


def slots_of(positions: Iterable[int], pages: Sequence[int], page_size: int) -> list[int]:
    """Returns the cache slots of a session's positions; `pages` is its page table."""
    return [pages[at // page_size] * page_size + at % page_size for at in positions]


@value
class Row:
    """Tokens to feed for one session.

    `tokens` follow the session's first `start` tokens, which are cached. With `decide`, the last of them are the nodes
    of `draft`, to be verified, and one further token is drawn. Without it, the row only fills the cache (a chunk of a
    long prompt). `pages` of the cache hold the session, up to the row's end.
    """

    session: str
    tokens: tuple[int, ...]
    start: int
    decide: bool
    pages: tuple[int, ...]
    draft: DraftTree = NO_TREE
    state_slots: tuple[int, ...] = ()  # slots of the last positions, whose hidden states are requested

    def in_pages(self, pages: tuple[int, ...], state_slots: tuple[int, ...] = ()) -> "Row":
        """Returns a copy of the row with these pages and state slots."""
        return Row(self.session, self.tokens, self.start, self.decide, pages, self.draft, state_slots)

    @property
    def drafted(self) -> int:
        """Number of draft tokens."""
        return len(self.draft.tokens)

    @property
    def deciding(self) -> int:
        """Number of positions whose logits decide: after the tokens decided before, and after each draft token."""
        return len(self.draft.tokens) + 1 if self.decide else 0

    @property
    def known(self) -> int:
        """Number of the row's tokens that were decided before the step."""
        return len(self.tokens) - len(self.draft.tokens)

    @property
    def feeds_prompt(self) -> bool:
        """True if the session is not past its prompt."""
        return self.known > 1 or not self.decide

    @property
    def base_len(self) -> int:
        """Number of tokens decided before the step, cached ones included."""
        return self.start + self.known

    @property
    def states_from(self) -> int:
        """First position whose hidden states the outcome should contain."""
        return self.start + len(self.tokens) - len(self.state_slots)

    def states_along(self, path: Sequence[int]) -> list[int]:
        """Returns the slots of the states in the outcome, in order, if the nodes on `path` are accepted."""
        known_slots = len(self.state_slots) - self.drafted
        return [*self.state_slots[:known_slots], *[self.state_slots[known_slots + node] for node in path]]

    def kept(self, path: Sequence[int], page_size: int) -> list[SlotMove]:
        """Returns the moves that place a path's nodes in consecutive slots after the tokens decided before."""
        if not path or path[-1] == len(path) - 1:
            return []  # the accepted nodes are in place already
        slots = slots_of(range(self.base_len, self.base_len + path[-1] + 1), self.pages, page_size)
        return [SlotMove(slots[node], slots[step]) for step, node in enumerate(path) if node != step]


@value
class StepPlan:
    """One step, carried out in this order: sessions to close, sessions to open, cache moves, page copies, and the rows
    of one forward pass.
    """

    closes: tuple[str, ...]
    opens: tuple[Open, ...]
    rows: tuple[Row, ...]
    copies: tuple[PageCopy, ...] = ()  # made after all cache moves
    moves: tuple[SlotMove, ...] = ()  # moves of accepted nodes of the latest step with rows


@value
class StateRead:
    """Hidden states to read from the cache, for a session's positions from `first` on."""

    session: str
    first: int
    slots: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.slots)


@value
class Outcome:
    """The engine's answer for one deciding row: the draft's nodes on `path` are accepted, followed by `next_token`.

    If `is_finite` is False, the row's logits were NaN or infinite: nothing is decided, and the session must end.
    """

    session: str
    path: tuple[int, ...]
    next_token: int
    margin: float | None = None  # lead in logits over the rival token named in the session's Open
    states: bytes = b""  # states of the row's `state_slots`, without nodes off the path
    scores: tuple[TokenScore, ...] = ()  # scores of the committed tokens, if the session's Open requests them
    prompt_scores: tuple[TokenScore, ...] = ()  # scores of the prompt from its second token on, with the first decision
    is_finite: bool = True

    @property
    def token_count(self) -> int:
        """Number of committed tokens."""
        return len(self.path) + 1 if self.is_finite else 0

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.path)

    def tokens_of(self, row: Row) -> tuple[int, ...]:
        """Returns the committed tokens: the accepted ones and the next one."""
        tokens = row.draft.tokens
        return (*[tokens[node] for node in self.path], self.next_token)


def riding(rows: Sequence[Row], outcomes: Sequence[Outcome], read: Callable[[list[int]], bytes]) -> list[Outcome]:
    """Returns the outcomes with the hidden states in their rows' slots, which go with the verdicts; one call reads all.

    There is one outcome for each row, in the rows' order.
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
