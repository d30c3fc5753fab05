"""The interface of an engine: a step behind one awaitable message, off the event loop that serves gRPC.

`tensor_parallel.py` holds the tensor-parallel engine.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from actors.engine.executor import StepExecutor
from cluster.verification.step import Outcome, StateRead, StepPlan


class Engine(Protocol):
    """Computes step plans, one at a time."""

    async def step(self, plan: StepPlan) -> list[Outcome]:
        """Raises EngineError when the engine is no longer usable."""
        ...

    async def read(self, asked: StateRead) -> bytes:
        """Hidden states that the cache holds, between two steps; raises as `step` does."""
        ...

    async def prepare(self, grammar: str) -> str | None:
        """Compiles a grammar before a session that has it comes to a step; returns why not, where that cannot be.

        Steps go on meanwhile. Raises as `step` does.
        """
        ...

    async def close(self) -> None: ...


class ThreadEngine:
    """An engine in this process, on one thread of its own."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def step(self, plan: StepPlan) -> list[Outcome]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._executor.step, plan)

    async def read(self, asked: StateRead) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._executor.read, asked)

    async def prepare(self, grammar: str) -> str | None:
        return await asyncio.to_thread(self._executor.prepare, grammar)

    async def close(self) -> None:
        self._thread.shutdown(wait=True)
