"""Cost of a vLLM target's steps, measured once before it serves, for one row with drafts and for several rows."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from actors.engine.profile import least_seconds
from cluster.costs import ForwardCost
from cluster.verification.step import Outcome, Row, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Open, Sampling

SIZES = (1, 2, 4, 8, 16, 32)  # tokens per step
PROMPT = (1, 2, 3, 4)


class StepProfile:
    """Profiles the idle engine behind `step`; drafts have at most `longest` tokens, sessions at most `context`."""

    def __init__(self, step: Callable[[StepPlan], list[Outcome]], longest: int, sessions: int, context: int) -> None:
        self._step = step
        self._context = context
        self._by_row = [size for size in SIZES if size <= longest + 1]
        self._by_rows = [size for size in SIZES if 1 < size <= sessions]
        self._lengths: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def measure(self) -> ForwardCost:
        """Measures steps whose drafts are almost all rejected."""
        names = [f"profile-{index}" for index in range(max([1, *self._by_rows]))]
        self._feed(names, 0, opens=tuple(self._open(name) for name in names))
        todo = [partial(self._feed, names[:1], size - 1) for size in self._by_row]
        todo += [partial(self._feed, names[:rows], 0) for rows in self._by_rows]
        seconds = least_seconds(todo)
        self._step(StepPlan(tuple(names), (), ()))
        return _cost(self._by_row, seconds[: len(self._by_row)], self._by_rows, seconds[len(self._by_row) :])

    def _open(self, name: str) -> Open:
        self._lengths[name] = 0
        return Open(
            session=name,
            attempt=0,
            tokens=PROMPT,
            prompt_len=len(PROMPT),
            max_len=self._context,
            stop_ids=(),
            sampling=Sampling(temperature=0.0),
            seed=0,
            choice=0,
            hash_key=0,
            acceptance=Acceptance.COUPLED,
            max_draft_tokens=max(self._by_row),
        )

    def _feed(self, names: Sequence[str], drafted: int, opens: tuple[Open, ...] = ()) -> None:
        rows = []
        for name in names:
            start = self._lengths[name]
            known = (self._last[name],) if start else PROMPT
            draft = DraftTree.chain((0,) * drafted)
            rows.append(Row(name, known + draft.tokens, start, decide=True, pages=(), draft=draft))
        for row, outcome in zip(rows, self._step(StepPlan((), opens, tuple(rows))), strict=True):
            self._lengths[row.session] = row.base_len + outcome.accepted
            self._last[row.session] = outcome.next_token


def _cost(sizes: Sequence[int], whole: Sequence[float], rows: Sequence[int], apart: Sequence[float]) -> ForwardCost:
    """Fits the cost per row and per token.

    Extra rows cost at least as much as extra tokens; the rest is the tokens'.
    """
    by_tokens = dict(zip(sizes, whole, strict=True))
    more = [
        max(0.0, taken - by_tokens[size]) / (size - 1)
        for size, taken in zip(rows, apart, strict=True)
        if size in by_tokens
    ]
    per_row_s = median(more) if more else 0.0
    rising = 0.0
    points = []
    for size, taken in by_tokens.items():
        rising = max(rising, taken)
        points.append((size, max(0.0, rising - per_row_s)))
    return ForwardCost(by_tokens=tuple(points), per_row_s=per_row_s)
