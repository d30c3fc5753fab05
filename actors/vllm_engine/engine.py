"""Engine of a target replica whose forwards are vLLM's, run off the event loop that serves gRPC."""

import asyncio
import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from actors.engine.capture import CaptureSpec
from actors.engine.tensor_parallel import RankReport
from actors.grammars.compiler import GrammarCompiler, grammars_of
from actors.grammars.vocabulary import load_grammar_vocabulary
from actors.vllm_engine.arguments import ENVIRONMENT
from actors.vllm_engine.self_test import check_engine
from actors.vllm_engine.step_profile import StepProfile
from cluster.config import SlipstreamConfig
from cluster.costs import ForwardCost
from cluster.engines.session_memory import EnginePages
from cluster.errors import EngineError, ModelError
from cluster.verification.step import Outcome, StateRead, StepPlan

Asked = TypeVar("Asked")
Found = TypeVar("Found")


class VllmEngine:
    """Runs vLLM in this process. If a rank of vLLM dies, `watch` raises."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._core: Any = None
        self._grammars: GrammarCompiler | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.step_cost = ForwardCost.linear(0.0)
        self.reports: tuple[RankReport, ...] = ()  # vLLM's ranks send none
        self.pids: tuple[int, ...] = ()

    @classmethod
    async def start(
        cls, config: SlipstreamConfig, folder: str, vocabulary: int, capture: CaptureSpec | None = None
    ) -> "VllmEngine":
        """Loads the model, tests its decisions about blocks, and measures steps.

        Raises ModelError if vLLM is not installed or rejects the arguments, EngineError if it fails.
        """
        engine = cls(ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm"))
        await engine._on_thread(engine._load, config, folder, vocabulary, capture, asyncio.get_running_loop())
        return engine

    def _load(
        self,
        config: SlipstreamConfig,
        folder: str,
        vocabulary: int,
        capture: CaptureSpec | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        for name, setting in ENVIRONMENT.items():
            os.environ.setdefault(name, setting)
        try:
            module = importlib.import_module("actors.vllm_engine.core")
        except ImportError as error:
            raise ModelError(
                f"target.engine is vllm, but it is not there: {error}; install the extra [vllm]"
            ) from error
        failed = partial(loop.call_soon_threadsafe, self._fail)
        self._core = module.start_core(config, folder, vocabulary, failed, capture)
        self._grammars = grammars_of(lambda: load_grammar_vocabulary(Path(folder)))
        longest = config.speculation.max_draft_tokens
        check_engine(self._core.step, self.memory.fed, vocabulary, longest)
        pool = config.target
        self.step_cost = StepProfile(self._core.step, longest, pool.max_sessions, config.model.max_context).measure()

    def _fail(self) -> None:
        if not self._failed.done():
            self._failed.set_result(None)

    @property
    def memory(self) -> EnginePages:
        memory: EnginePages = self._core.memory
        return memory

    async def step(self, plan: StepPlan) -> list[Outcome]:
        """Runs a step. Raises EngineError when vLLM is no longer usable."""
        outcomes: list[Outcome] = await self._on_thread(self._computed, "a step", self._core.step, plan)
        return outcomes

    def _computed(self, what: str, compute: Callable[[Asked], Found], asked: Asked) -> Found:
        try:
            return compute(asked)
        except Exception as error:  # whatever vLLM raised, it cannot run another step
            raise EngineError(f"{what} of vLLM failed: {type(error).__name__}: {error}") from error

    async def read(self, asked: StateRead) -> bytes:
        states: bytes = await self._on_thread(self._computed, "reading hidden states", self._core.read, asked)
        return states

    async def prepare(self, grammar: str) -> str | None:
        """Compiles a grammar here and in each worker, beside the steps; returns what is wrong with it, or None."""
        if self._grammars is None:
            return "this target has none"
        await self._on_thread(self._core.begin_grammar, grammar)
        return await asyncio.to_thread(self._grammars.fault, grammar)

    async def watch(self) -> NoReturn:
        """Waits until a rank of vLLM has died; raises EngineError."""
        await self._failed
        raise EngineError("a worker of vLLM has ended")

    async def close(self) -> None:
        await self._on_thread(self._core.close)
        self._thread.shutdown(wait=False)

    async def _on_thread(self, work: Callable[..., Found], *args: Any) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
