"""What a target's steps cost on this machine, measured once before it serves."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from statistics import median

from actors.compute.kv_cache import FeedRow
from actors.engine.runner import Runner
from cluster.costs import ForwardCost

SIZES = (1, 4, 6, 8, 12, 16, 32, 64)  # tokens of a step; a processor's products have steps at some of them
CONTEXT = 64  # tokens before them
REPEATS = 5  # turns, of which the fastest counts: when a pool starts, much else does too


def profile_steps(runner: Runner, page_size: int, pages: int) -> ForwardCost:
    """Forwards over one row of so many tokens, and over so many rows of one; overwrites the cache's first pages.

    Sizes that the pages have no room for are left out.
    """
    sizes = [size for size in SIZES if size <= pages * page_size]
    one_row = []
    single_tokens = []
    for size in sizes:
        start = min(CONTEXT, pages * page_size - size)
        # Rows may share pages here: what they read and write does not matter.
        needed = tuple(range(-(-(start + size) // page_size)))
        one_row.append([FeedRow((0,) * size, start, size, needed)])
        single_tokens.append([FeedRow((0,), start, 1, needed)] * size)
    seconds = least_seconds([partial(_forward, runner, rows) for rows in (*one_row, *single_tokens)])
    whole = list(accumulate(seconds[: len(sizes)], max))
    apart = seconds[len(sizes) :]
    rows = [
        max(0.0, more - less) / (size - 1) for size, less, more in zip(sizes, whole, apart, strict=True) if size > 1
    ]
    per_row_s = median(rows) if rows else 0.0
    by_tokens = tuple((size, max(0.0, taken - per_row_s)) for size, taken in zip(sizes, whole, strict=True))
    return ForwardCost(by_tokens=by_tokens, per_row_s=per_row_s)


def _forward(runner: Runner, rows: list[FeedRow]) -> None:
    runner.forward(rows).logits.max(dim=-1).indices.tolist()  # the result is fetched, as a verdict needs it


def least_seconds(todo: Sequence[Callable[[], object]]) -> list[float]:
    """The least seconds of each of several things.

    They take turns, so that whatever else a machine is at does not fall on one of them alone; the first turn, in which
    memory is allocated and prompts are read, does not count.
    """
    turns = []
    for _ in range(1 + REPEATS):
        seconds = []
        for do in todo:
            began = time.perf_counter()
            do()
            seconds.append(time.perf_counter() - began)
        turns.append(seconds)
    return [min(found) for found in zip(*turns[1:], strict=True)]
