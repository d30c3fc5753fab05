"""What steps and drafting passes cost on this machine, measured once before anything is served.

Knows nothing of what the measurements are for.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from statistics import median

from actors.cache import FeedRow
from actors.methods import DraftingMethod
from actors.runner import Runner
from cluster.costs import DraftCost, ForwardCost
from cluster.drafting import DrafterLimits
from cluster.wants import Want
from protos.messages import Acceptance, Open, Sampling
from protos.prefix import Prefix

SIZES = (1, 4, 6, 8, 12, 16, 32, 64)  # tokens of a step; a processor's products have steps at some of them
CONTEXT = 64  # tokens before them
REPEATS = 5  # turns, of which the fastest counts: when a pool starts, much else does too
ROWS = (1, 4, 16)  # sessions in a drafting pass
LONG = 4  # forwards of a drafting pass
PROMPT_TOKENS = 8


def profile_steps(runner: Runner, page_size: int, pages: int) -> ForwardCost:
    """Forwards over one row of so many tokens, and over so many rows of one; overwrites the cache's first pages.

    Sizes that the pages have no room for are left out.
    """
    sizes = [size for size in SIZES if size <= pages * page_size]
    one_row, single_tokens = [], []
    for size in sizes:
        start = min(CONTEXT, pages * page_size - size)
        # Rows may share pages here: what they read and write does not matter.
        needed = tuple(range(-(-(start + size) // page_size)))
        one_row.append([FeedRow((0,) * size, start, size, needed)])
        single_tokens.append([FeedRow((0,), start, 1, needed)] * size)
    seconds = _least_s([partial(_forward, runner, rows) for rows in (*one_row, *single_tokens)])
    whole, apart = list(accumulate(seconds[: len(sizes)], max)), seconds[len(sizes) :]
    rows = [
        max(0.0, more - less) / (size - 1) for size, less, more in zip(sizes, whole, apart, strict=True) if size > 1
    ]
    per_row_s = median(rows) if rows else 0.0
    by_tokens = tuple((size, max(0.0, taken - per_row_s)) for size, taken in zip(sizes, whole, strict=True))
    return ForwardCost(by_tokens=by_tokens, per_row_s=per_row_s)


def _forward(runner: Runner, rows: list[FeedRow]) -> None:
    runner.forward(rows).max(dim=-1).indices.tolist()  # the result is fetched, as a verdict needs it


def _least_s(todo: Sequence[Callable[[], object]]) -> list[float]:
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


def profile_drafting(method: DraftingMethod, limits: DrafterLimits) -> DraftCost:
    """Drafting passes over sessions whose prompts are known; leaves no session behind.

    A method that finds nothing in these prompts is measured at finding nothing.
    """
    sizes, width = [rows for rows in ROWS if rows == 1 or rows <= limits.max_sessions], method.tokens_per_forward
    lengths = (1, width, LONG * width)
    wants = [[_want(limits, index, length) for index in range(rows)] for rows in sizes for length in lengths]
    seconds = iter(_least_s([partial(method.propose, each, lambda: False) for each in wants]))
    method.close([want.open.session for want in wants[-1]])
    forwards, further, passes = [], [], []
    for rows, (one, whole, long) in zip(sizes, zip(seconds, seconds, seconds, strict=True), strict=True):
        naming_s = max(0.0, whole - one)  # all but the first of a forward's tokens
        forward_s = max(0.0, (long - whole) / (LONG - 1) - naming_s)
        forwards.append((rows, forward_s))
        further.append((rows, naming_s / max(1, width - 1)))
        passes.append(max(0.0, one - forward_s))
    return DraftCost(
        forward=ForwardCost(by_tokens=tuple(forwards)),
        further=ForwardCost(by_tokens=tuple(further)),
        per_pass_s=median(passes),
        tokens_per_forward=width,
    )


def _want(limits: DrafterLimits, index: int, length: int) -> Want:
    """Greedy, and of the length asked for however unlikely its tokens; no two prompts share a page."""
    tokens = tuple((index * PROMPT_TOKENS + position) % limits.vocabulary for position in range(PROMPT_TOKENS))
    request = Open(
        session=f"profile {index}",
        attempt=1,
        tokens=tokens,
        prompt_len=len(tokens),
        max_len=limits.max_context,
        stop_ids=(),
        sampling=Sampling(temperature=0.0),
        seed=0,
        choice=0,
        hash_key=0,
        acceptance=Acceptance.COUPLED,
        max_draft_tokens=length,
    )
    return Want(request, tokens, Prefix(0, tokens).hash, length)
