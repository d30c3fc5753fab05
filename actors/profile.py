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

SIZES = (1, 4, 8, 16, 32, 64)  # tokens
REPEATS = 3
ROWS = (1, 4, 16)  # sessions in a drafting pass
SHORT, LONG = 1, 4  # blocks of a drafting pass, in tokens
PROMPT_TOKENS = 8


def profile_steps(runner: Runner, page_size: int, pages: int) -> list[tuple[int, float]]:
    """(tokens, seconds) of forwards over one row; overwrites the cache's first pages."""
    measured: list[tuple[int, float]] = []
    for size in SIZES:
        needed = -(-size // page_size)
        if needed > pages:
            break
        row = FeedRow((0,) * size, 0, size, tuple(range(needed)))
        runner.forward([row])  # the first of its size may allocate
        for _ in range(REPEATS):
            began = time.perf_counter()
            runner.forward([row]).argmax(dim=-1).tolist()  # the result is fetched, as a verdict needs it
            measured.append((size, time.perf_counter() - began))
    return measured


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
    """Median seconds of a pass; the first one, which feeds the prompts, does not count."""
    wants = [_want(limits, index, length) for index in range(rows)]
    seconds = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        method.propose(wants, lambda: False)
        seconds.append(time.perf_counter() - began)
    method.close([want.open.session for want in wants])
    return median(seconds[1:])


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
