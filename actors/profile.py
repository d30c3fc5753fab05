"""What steps cost on this machine, measured once before anything is served.

Knows nothing of what the measurements are for.
"""

import time

from actors.cache import FeedRow
from actors.runner import Runner

SIZES = (1, 4, 8, 16, 32, 64)  # tokens
REPEATS = 3


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
