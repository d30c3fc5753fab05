"""What a target's coordinator asks of its engine in one step, and what comes back.

One message each way a step. Knows nothing of torch: the engine turns it into tensors.
"""

from typing import Protocol

from cluster.page_allocator import PageCopy
from protos.messages import Open, SparseProbs
from protos.values import value


class StepEngine(Protocol):
    """Computes step plans, one at a time."""

    def step(self, plan: "StepPlan") -> "list[Outcome]":
        """One outcome for each row that decides, in order."""
        ...


@value
class Row:
    """Tokens to feed for one session.

    `tokens` follow the session's first `start` tokens, which are cached. With `decide`, the last of them are draft
    tokens to verify, `draft_len` that follow one another and then `alternatives` to the first of these, and one further
    token is drawn; without, the row only fills the cache (a chunk of a long prompt). `pages` of the cache hold the
    session, up to the row's end.
    """

    session: str
    tokens: tuple[int, ...]
    start: int
    decide: bool
    pages: tuple[int, ...]
    draft_len: int = 0
    draft_probs: SparseProbs | None = None
    alternatives: int = 0

    def in_pages(self, pages: tuple[int, ...]) -> "Row":
        """The same with these pages."""
        return Row(
            self.session,
            self.tokens,
            self.start,
            self.decide,
            pages,
            self.draft_len,
            self.draft_probs,
            self.alternatives,
        )

    @property
    def drafted(self) -> int:
        """Draft tokens in all."""
        return self.draft_len + self.alternatives

    @property
    def known(self) -> int:
        """Tokens that were decided before."""
        return len(self.tokens) - self.draft_len - self.alternatives

    @property
    def draft(self) -> tuple[int, ...]:
        """Draft tokens that follow one another."""
        return self.tokens[self.known : self.known + self.draft_len]

    @property
    def to_first(self) -> tuple[int, ...]:
        """Alternatives to the first draft token."""
        return self.tokens[self.known + self.draft_len :]


@value
class StepPlan:
    """Sessions to forget, then sessions to add, then pages to copy, then rows to run in one forward."""

    closes: tuple[str, ...]
    opens: tuple[Open, ...]
    rows: tuple[Row, ...]
    copies: tuple[PageCopy, ...] = ()


@value
class Outcome:
    """The engine's answer for one deciding row: `accepted` draft tokens stand, then comes `next_token`.

    With `alternative`, the one accepted token is this one, and not the first that was drafted.
    """

    session: str
    accepted: int
    next_token: int
    alternative: int | None = None

    def tokens_of(self, row: Row) -> tuple[int, ...]:
        """What was decided: the accepted tokens, and the next one."""
        if self.alternative is not None:
            return self.alternative, self.next_token
        return (*row.draft[: self.accepted], self.next_token)
