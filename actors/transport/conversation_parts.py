"""Concurrent tasks of one stream (reading, writing, watching) that end together."""

import asyncio
from typing import Any


async def until_one_ends(*coroutines: Any) -> None:
    """Runs until the first coroutine ends, cancels the others, and raises what the first one raised."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        failures = list(filter(None, [task.exception() for task in done]))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # The exception references this frame by its traceback; without clearing, the cycle would keep the stream alive.
    tasks.clear()
    done.clear()
    if failures:
        raise failures.pop()
