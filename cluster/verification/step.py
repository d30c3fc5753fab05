"""What a target's coordinator asks of its engine in one step, and what comes back.

One message each way a step. Knows nothing of torch: the engine turns it into tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.page_allocator import PageCopy, PlaceMove
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Open
from protos.scores import TokenScore
from protos.values import value


class StepEngine(Protocol):
    """Computes step plans, one at a time."""

    def step(self, plan: "StepPlan") -> "list[Outcome]":
        """One outcome for each row that decides, in order."""
        ...


def places_of(positions: Iterable[int], pages: Sequence[int], page_size: int) -> list[int]:
    """Of a session whose pages these are."""
    return [pages[at // page_size] * page_size + at % page_size for at in positions]


@value
class Row:
    """Tokens to feed for one session.

    `tokens` follow the session's first `start` tokens, which are cached. With `decide`, the last of them are the nodes
    of `draft`, to verify, and one further token is drawn; without, the row only fills the cache (a chunk of a long
    prompt). `pages` of the cache hold the session, up to the row's end.
    """

    session: str
    tokens: tuple[int, ...]
    start: int
    decide: bool
    pages: tuple[int, ...]
    draft: DraftTree = NO_TREE
    state_places: tuple[int, ...] = ()  # of the last positions, whose hidden states are wanted

    def in_pages(self, pages: tuple[int, ...], state_places: tuple[int, ...] = ()) -> "Row":
        """The same with these pages."""
        return Row(self.session, self.tokens, self.start, self.decide, pages, self.draft, state_places)

    @property
    def drafted(self) -> int:
        """Draft tokens."""
        return len(self.draft.tokens)

    @property
    def deciding(self) -> int:
        """Places whose logits decide: after the tokens decided before, and after each draft token."""
        return len(self.draft.tokens) + 1 if self.decide else 0

    @property
    def known(self) -> int:
        """Tokens that were decided before."""
        return len(self.tokens) - len(self.draft.tokens)

    @property
    def feeds_prompt(self) -> bool:
        """Whether its session is not past its prompt."""
        return self.known > 1 or not self.decide

    @property
    def base_len(self) -> int:
        """Tokens that were decided before, those in the cache among them."""
        return self.start + self.known

    @property
    def states_from(self) -> int:
        """First position whose hidden states the outcome is to have."""
        return self.start + len(self.tokens) - len(self.state_places)

    def states_along(self, path: Sequence[int]) -> list[int]:
        """Places whose states the outcome is to have once the nodes on `path` are accepted, in the path's order."""
        known = len(self.state_places) - self.drafted
        return [*self.state_places[:known], *[self.state_places[known + node] for node in path]]

    def kept(self, path: Sequence[int], page_size: int) -> list[PlaceMove]:
        """What brings the nodes on a path to where they follow one another, after the tokens decided before."""
        if not path or path[-1] == len(path) - 1:
            return []  # the first nodes: they lie there already
        places = places_of(range(self.base_len, self.base_len + path[-1] + 1), self.pages, page_size)
        return [PlaceMove(places[node], places[step]) for step, node in enumerate(path) if node != step]


@value
class StepPlan:
    """Sessions to forget, then sessions to add, then what to move and copy in the cache, then rows for one forward."""

    closes: tuple[str, ...]
    opens: tuple[Open, ...]
    rows: tuple[Row, ...]
    copies: tuple[PageCopy, ...] = ()  # once all is moved
    moves: tuple[PlaceMove, ...] = ()  # of what the latest step with rows has accepted


@value
class StateRead:
    """Hidden states to read from the cache, of a session's positions from `first` on."""

    session: str
    first: int
    places: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.places)


@value
class Outcome:
    """The engine's answer for one deciding row: the draft's nodes on `path` stand, then comes `next_token`.

    Where `is_finite` is false, the row's logits were NaN or infinite: nothing is decided, and the session must end.
    """

    session: str
    path: tuple[int, ...]
    next_token: int
    margin: float | None = None  # ahead of the rival that the session's Open names
    states: bytes = b""  # of the places that the row names, but for nodes off the path
    scores: tuple[TokenScore, ...] = ()  # of what was decided, where the session's Open asks for them
    prompt_scores: tuple[TokenScore, ...] = ()  # of the prompt's tokens, from the second on, with the first decision
    is_finite: bool = True

    @property
    def token_count(self) -> int:
        """Decided tokens."""
        return len(self.path) + 1 if self.is_finite else 0

    @property
    def accepted(self) -> int:
        """How many draft tokens stand."""
        return len(self.path)

    def tokens_of(self, row: Row) -> tuple[int, ...]:
        """What was decided: the accepted tokens, and the next one."""
        tokens = row.draft.tokens
        return (*[tokens[node] for node in self.path], self.next_token)


def riding(rows: Sequence[Row], outcomes: Sequence[Outcome], read: Callable[[list[int]], bytes]) -> list[Outcome]:
    """With the hidden states that are to ride with the verdicts, all read at once by their places.

    There is an outcome for each of the rows, in their order.
    """
    if not any(row.state_places for row in rows):
        return list(outcomes)
    places = [
        row.states_along(outcome.path) if row.state_places else [] for row, outcome in zip(rows, outcomes, strict=True)
    ]
    states = read([place for each in places for place in each])
    row_bytes = len(states) // max(1, sum(map(len, places)))
    found = []
    at = 0
    for outcome, each in zip(outcomes, places, strict=True):
        end = at + row_bytes * len(each)
        found.append(replace(outcome, states=states[at:end]))
        at = end
    return found
