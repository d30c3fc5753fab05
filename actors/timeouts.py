"""Waiting with a limit that counts no time in which this process itself stood still."""

import asyncio
from typing import Any

LOOK_S = 1.0  # of waiting between two looks: as much as a stop of whatever length counts


async def done_within(limit_s: float, work: asyncio.Future[Any]) -> bool:
    """Whether it is done before it has been waited for so long.

    A process that was stopped, or whose machine was, finds its time over and the answer not yet read: it would give up
    what goes on as well as before.
    """
    left_s = limit_s
    while not work.done() and left_s >= 0:
        await asyncio.wait((work,), timeout=min(left_s, LOOK_S))
        left_s -= LOOK_S
    return work.done()
