"""Reading, writing and watching of one stream, which end together."""

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
    # A failure knows where it was raised: what is named here knew of it in turn, and of the stream, for ever.
    tasks.clear()
    done.clear()
    if failures:
        raise failures.pop()
