"""Work that goes on as long as every rank does, and the failure of one: whoever waits for it would wait for ever."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, NoReturn, TypeVar

from ray.exceptions import RayError

from cluster.errors import EngineError

Done = TypeVar("Done")


async def first_to_end(running: Sequence[Awaitable[Any]]) -> NoReturn:
    """Waits until one of these ends, which is always a failure; raises EngineError."""
    tasks = [asyncio.ensure_future(reference) for reference in running]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except RayError as error:
        raise EngineError(f"a tensor-parallel rank failed: {error}") from error
    finally:
        for task in tasks:
            task.cancel()
    raise EngineError("a tensor-parallel rank has ended")


async def while_running(work: Awaitable[Done], running: Sequence[Awaitable[Any]]) -> Done:
    """What comes of `work`, in which one rank may wait for others for ever; raises EngineError once one has ended."""
    if not running:
        return await work
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(first_to_end(running))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else watching.result()
    finally:
        working.cancel()
        watching.cancel()
