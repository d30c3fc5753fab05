"""What steps and drafting passes cost on this machine, measured once before anything is served.

Knows nothing of what the measurements are for.
"""

import time
from statistics import median

from actors.cache import FeedRow
from actors.methods import DraftingMethod
from actors.runner import Runner
from cluster.costs import DraftCost, ForwardCost
from cluster.drafting import DrafterLimits, Want
from protos.messages import Acceptance, Open, Sampling
from protos.prefix import Prefix

SIZES = (1, 4, 8, 16, 32, 64)  # tokens of a step
CONTEXT = 64  # tokens before them
REPEATS = 5  # of which the fastest counts: when a pool starts, much else does too
ROWS = (1, 4, 16)  # sessions in a drafting pass
SHORT, LONG = 1, 4  # blocks of a drafting pass, in tokens
PROMPT_TOKENS = 8


def profile_steps(runner: Runner, page_size: int, pages: int) -> ForwardCost:
    """Forwards over one row of so many tokens, and over so many rows of one; overwrites the cache's first pages.

    Sizes that the pages have no room for are left out.
    """
    points: list[tuple[int, float]] = []
    per_row: list[float] = []
    for size in SIZES:
        start = min(CONTEXT, pages * page_size - size)
        if start < 0:
            break
        # Rows may share pages here: what they read and write does not matter.
        needed = -(-(start + size) // page_size)
        one_row = [FeedRow((0,) * size, start, size, tuple(range(needed)))]
        rows = [FeedRow((0,), start, 1, tuple(range(needed)))] * size
        seconds = _forward_s(runner, one_row)
        if size > 1:
            per_row.append(max(0.0, _forward_s(runner, rows) - seconds) / (size - 1))
        points.append((size, max(seconds, points[-1][1]) if points else seconds))
    per_row_s = median(per_row) if per_row else 0.0
    by_tokens = tuple((size, max(0.0, seconds - per_row_s)) for size, seconds in points)
    return ForwardCost(by_tokens=by_tokens, per_row_s=per_row_s)


def _forward_s(runner: Runner, rows: list[FeedRow]) -> float:
    """Least seconds; the first forward of its size, which may allocate, does not count."""
    seconds = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        runner.forward(rows).max(dim=-1).indices.tolist()  # the result is fetched, as a verdict needs it
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def profile_drafting(method: DraftingMethod, limits: DrafterLimits) -> DraftCost:
    """Drafting passes over sessions whose prompts are known; leaves no session behind.

    A method that finds nothing in these prompts is measured at finding nothing.
    """
    points, passes = [], []
    for rows in (rows for rows in ROWS if rows == 1 or rows <= limits.max_sessions):
        short, long = (_pass_s(method, limits, rows, length) for length in (SHORT, LONG))
        token_s = max(0.0, long - short) / (LONG - SHORT)
        points.append((rows, token_s))
        passes.append(max(0.0, short - SHORT * token_s))
    return DraftCost(forward=ForwardCost(by_tokens=tuple(points)), per_pass_s=median(passes))


def _pass_s(method: DraftingMethod, limits: DrafterLimits, rows: int, length: int) -> float:
    """Least seconds of a pass; the first one, which feeds the prompts, does not count."""
    wants = [_want(limits, index, length) for index in range(rows)]
    seconds = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        method.propose(wants, lambda: False)
        seconds.append(time.perf_counter() - began)
    method.close([want.open.session for want in wants])
    return min(seconds[1:])


def _want(limits: DrafterLimits, index: int, length: int) -> Want:
    """Under ratio a block has the length asked for, however unlikely its tokens; no two prompts share a page."""
    tokens = tuple((index * PROMPT_TOKENS + position) % limits.vocabulary for position in range(PROMPT_TOKENS))
    request = Open(
        session=f"profile {index}",
        attempt=1,
        tokens=tokens,
        prompt_len=len(tokens),
        max_len=limits.max_context,
        stop_ids=(),
        sampling=Sampling(),
        seed=0,
        choice=0,
        hash_key=0,
        acceptance=Acceptance.RATIO,
        max_draft_tokens=length,
    )
    return Want(request, tokens, Prefix(0, tokens).hash, length)
