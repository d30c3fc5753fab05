"""How long the start of a replica may take: Serve, which starts another for one that fails, waits for ever for it."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from cluster.errors import EngineError

Started = TypeVar("Started")


async def started_within(limit_s: float, key: str, starting: Awaitable[Started]) -> Started:
    """What was started; raises EngineError, which names the configuration's `key`, for a start that hangs.

    What runs in a thread goes on: the process has to end.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await starting
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EngineError(
            f"the model was not loaded and measured within {limit_s:g} s, so this replica ends and Serve starts"
            f" another; where loading takes that long, raise {key}, else look for a process or a disk that hangs"
        ) from error
