"""Runs a target replica's forwards with vLLM, off the gRPC event loop.

`StepProfile` measures step costs before serving, for one row with drafts and for several rows.
"""

import asyncio
import importlib
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeVar

from actors.compute.hidden_states import CaptureSpec
from actors.engine.runner import fastest_s
from actors.engine.tensor_parallel import RankReport
from actors.grammars import GrammarCompiler, grammars_of, load_grammar_vocabulary
from actors.vllm_engine.arguments import ENVIRONMENT
from actors.vllm_engine.self_test import check_engine
from cluster.config import SlipstreamConfig
from cluster.costs import ForwardCost
from cluster.errors import EngineError, ModelError
from cluster.page_allocator import EnginePages
from cluster.verification.step import Outcome, Row, StateRead, StepPlan
from protos.draft_tree import DraftTree
from protos.messages import Open

SIZES = (1, 2, 4, 8, 16, 32)  # tokens or rows per measured step
PROMPT = (1, 2, 3, 4)


class StepProfile:
    """Profiles an idle engine through `step`, with drafts of up to `longest` tokens and contexts of up to `context`
    tokens.
    """

    def __init__(self, step: Callable[[StepPlan], list[Outcome]], longest: int, sessions: int, context: int) -> None:
        self._step = step
        self._context = context
        self._by_row = [size for size in SIZES if size <= longest + 1]
        self._by_rows = [size for size in SIZES if 1 < size <= sessions]
        self._lengths: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def measure(self) -> ForwardCost:
        """Measures steps with fixed drafts, almost all of which are rejected."""
        names = [f"profile-{index}" for index in range(max([1, *self._by_rows]))]
        self._feed(names, 0, opens=tuple(self._open(name) for name in names))
        todo = [partial(self._feed, names[:1], size - 1) for size in self._by_row]
        todo += [partial(self._feed, names[:rows], 0) for rows in self._by_rows]
        seconds = fastest_s(todo)
        self._step(StepPlan(tuple(names), (), ()))
        return _cost(self._by_row, seconds[: len(self._by_row)], self._by_rows, seconds[len(self._by_row) :])

    def _open(self, name: str) -> Open:
        self._lengths[name] = 0
        return Open.measured(name, PROMPT, self._context, max(self._by_row))

    def _feed(self, names: Sequence[str], drafted: int, opens: tuple[Open, ...] = ()) -> None:
        rows = []
        for name in names:
            start = self._lengths[name]
            tokens = (self._last[name],) if start else PROMPT
            draft = DraftTree.chain((0,) * drafted)
            rows.append(Row(name, tokens + draft.tokens, start, decide=True, pages=(), draft=draft))
        for row, outcome in zip(rows, self._step(StepPlan((), opens, tuple(rows))), strict=True):
            self._lengths[row.session] = row.base_len + outcome.accepted
            self._last[row.session] = outcome.next_token


def _cost(sizes: Sequence[int], whole: Sequence[float], rows: Sequence[int], apart: Sequence[float]) -> ForwardCost:
    """Fits the cost per row and per token from steps of one row (`whole`) and of several rows (`apart`), in seconds.

    The cost per row is the median extra time per row, compared with one row of the same number of tokens. The remaining
    time is the cost of tokens.
    """
    by_tokens = dict(zip(sizes, whole, strict=True))
    more = [
        max(0.0, step_s - by_tokens[size]) / (size - 1)
        for size, step_s in zip(rows, apart, strict=True)
        if size in by_tokens
    ]
    per_row_s = median(more) if more else 0.0
    rising = 0.0
    points = []
    for size, step_s in by_tokens.items():
        rising = max(rising, step_s)
        points.append((size, max(0.0, rising - per_row_s)))
    return ForwardCost(by_tokens=tuple(points), per_row_s=per_row_s)


Requested = TypeVar("Requested")
Answer = TypeVar("Answer")


class VllmEngine:
    """Runs vLLM in this process. If a rank of vLLM dies, `watch` raises EngineError."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._core: Any = None
        self._grammars: GrammarCompiler | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.step_cost = ForwardCost.linear(0.0)
        self.reports: tuple[RankReport, ...] = ()  # empty, since vLLM's ranks do not report
        self.pids: tuple[int, ...] = ()

    @classmethod
    async def start(
        cls, config: SlipstreamConfig, folder: str, vocabulary: int, capture: CaptureSpec | None = None
    ) -> "VllmEngine":
        """Loads the model, runs the self-test and measures step costs.

        Raises ModelError if vLLM is not installed or rejects its arguments, and EngineError if it fails to start.
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
                f"target.engine is vllm, but vLLM cannot be imported: {error}; install the extra [vllm]"
            ) from error
        failed = partial(loop.call_soon_threadsafe, self._fail)
        self._core = module.start_core(config, folder, vocabulary, failed, capture)
        self._grammars = grammars_of(lambda: load_grammar_vocabulary(Path(folder)))
        longest = config.speculation.draft_tokens
        check_engine(self._core.step, self.memory.fed, vocabulary, longest)
        pool = config.target
        sessions = min(pool.max_sessions, pool.max_step_tokens // len(PROMPT))
        self.step_cost = StepProfile(self._core.step, longest, sessions, config.model.max_context).measure()

    def _fail(self) -> None:
        if not self._failed.done():
            self._failed.set_result(None)

    @property
    def memory(self) -> EnginePages:
        memory: EnginePages = self._core.memory
        return memory

    def step(self, plan: StepPlan) -> Awaitable[list[Outcome]]:
        """Starts a plan and returns its outcomes, which raise EngineError if it fails; vLLM is then unusable."""
        return self._on_thread(self._computed, "a step", self._core.step, plan)

    def _computed(self, what: str, compute: Callable[[Requested], Answer], request: Requested) -> Answer:
        try:
            return compute(request)
        except Exception as error:  # after any exception, vLLM is unusable
            raise EngineError(f"{what} of vLLM failed: {type(error).__name__}: {error}") from error

    async def read(self, read: StateRead) -> bytes:
        states: bytes = await self._on_thread(self._computed, "reading hidden states", self._core.read, read)
        return states

    async def prepare(self, grammar: str) -> str | None:
        """Compiles a grammar here and in each worker while steps run; returns an error message, or None on success."""
        if self._grammars is None:
            return "the target supports none"
        await self._on_thread(self._core.begin_grammar, grammar)
        return await asyncio.to_thread(self._grammars.fault, grammar)

    async def watch(self) -> NoReturn:
        """Waits until a rank of vLLM dies, then raises EngineError."""
        await self._failed
        raise EngineError("a worker of vLLM has ended")

    async def close(self) -> None:
        await self._on_thread(self._core.close)
        self._thread.shutdown(wait=False)

    def _on_thread(self, work: Callable[..., Answer], *args: Any) -> Awaitable[Answer]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
