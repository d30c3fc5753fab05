"""Stage C: steps of a target of 8B parameters, eager and captured, beside the bound of the memory's bandwidth."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from actors.attention.select_backend import attention_shape, choose_attention
from actors.engine.runner import ModelRunner
from actors.engine.static_step import Buckets, Recording
from actors.models.decoder import decoder_for
from cluster.verification.step import Row, StepPlan
from gpu_stages.results import OUT_OF_TIME, Emit, Result, Setting, Unmeasured
from gpu_stages.steps import (
    CAPTURE_FAILED,
    CAPTURED,
    EAGER,
    NOT_PADDED,
    PAGE_SIZE,
    TimedEngine,
    capturable,
    capture_on,
    copy_bandwidth,
    fill_cache,
    launches,
    sized_model,
    step_times,
    synchronize,
    weight_bytes,
)
from protos.draft_tree import DraftTree
from protos.messages import Open, Sampling

TREE = (-1, -1, 0, 0, 1, 2, 2, 5)  # parents of the tree's nodes
GREEDY, SAMPLED, DISTINCT = "greedy", "T = 1", "distinct"  # DISTINCT: each row has other parameters
CACHE_SHARE = 0.7  # of the memory left by the weights; the rest is for graphs, logits and eager attention
SECONDS_EACH = 3.0  # for one kind of step


@dataclass(frozen=True)
class Sizes:
    """Measured shapes; `shapes` are blocks by name, as parents of their draft tokens."""

    model: str
    vocabulary: int
    rows: tuple[int, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    contexts: tuple[int, ...]
    repeats: int


def chain(tokens: int) -> tuple[str, tuple[int, ...]]:
    """Returns a block that feeds `tokens` tokens, the last committed one and a chain of drafts."""
    return str(tokens), tuple(range(-1, tokens - 2))


FULL = Sizes("8b", 128_256, (1, 8, 32, 64), (chain(1), chain(5), chain(9), ("tree 9", TREE)), (512, 4000), 20)
TINY = Sizes("tiny", 500, (1, 3), (chain(1), chain(3), ("tree 9", TREE)), (20, 40), 2)


@dataclass(frozen=True)
class TargetModel(Result):
    """The model, and its attention in eager and captured steps."""

    model: str
    weight_bytes: int  # read by each step
    load_s: float
    attention: str
    captured_attention: str | None
    cached_tokens: int  # capacity of the cache
    bytes_per_s: float  # of copies, for the bound


@dataclass(frozen=True)
class Captures(Result):
    """Capture of all shapes before serving."""

    shapes: int
    seconds: float
    memory_bytes: int | None  # reserved for graphs; None on a CPU


@dataclass(frozen=True)
class TargetStep(Result):
    """Medians of one kind of step; see `StepTimes`."""

    mode: str
    sampling: str
    rows: int
    tokens: str  # of each row
    context: int
    step_ms: float
    device_ms: float
    host_ms: float
    between_ms: float
    floor_ms: float  # all weights, keys and values read once at copy bandwidth
    ratio: float  # step_ms / floor_ms


@dataclass(frozen=True)
class StepLaunches(Result):
    """Launches of one kind of step; see `Launches`."""

    mode: str
    sampling: str
    rows: int
    tokens: str
    context: int
    calls: int
    kernels: int | None


@dataclass(frozen=True)
class Case:
    """One kind of step."""

    sampling: str
    rows: int
    tokens: str
    parents: tuple[int, ...]
    context: int


def cases(sizes: Sizes) -> Iterator[Case]:
    """Yields all kinds of steps, the most informative first."""
    first, *longer = sizes.contexts
    for name, parents in sizes.shapes:
        for rows in sizes.rows:
            yield Case(GREEDY, rows, name, parents, first)
    for sampling in (SAMPLED, DISTINCT):
        for name, parents in sizes.shapes[:2]:
            for rows in sizes.rows:
                yield Case(sampling, rows, name, parents, first)
    for context in longer:
        for name, parents in sizes.shapes:
            for rows in sizes.rows:
                yield Case(GREEDY, rows, name, parents, context)


def run(setting: Setting, emit: Emit) -> None:
    sizes = TINY if setting.is_tiny else FULL
    bench = TargetBench(sizes, setting.device)
    emit(bench.model)
    emit(bench.captures)
    measured = []
    for case in cases(sizes):
        what = f"{case.sampling}, {case.rows} rows of {case.tokens}, context {case.context}"
        if not setting.has_time(0 if setting.is_tiny else SECONDS_EACH):
            emit(Unmeasured(f"{what}, and all after it", OUT_OF_TIME))
            break
        if why := bench.fault(case):
            emit(Unmeasured(what, why))
            continue
        try:
            for step in bench.measured(case):
                emit(step)
            measured.append(case)
            if isinstance(bench.captures, Captures) and not bench.is_capturable(case):
                emit(Unmeasured(f"captured, {what}", "the step exceeds the largest shape, so it runs eagerly"))
        except torch.OutOfMemoryError as error:
            emit(Unmeasured(what, f"out of memory: {error}"))
            torch.cuda.empty_cache()
    for case in filter(bench.is_counted, measured):  # last, since steps are slower after the profiler has run
        for counted in bench.launches(case):
            emit(counted)


def summary(results: Sequence[Result]) -> str:
    steps = [result for result in results if isinstance(result, TargetStep)]
    shown = [step for step in steps if step.sampling == GREEDY and step.rows == 1 and step.tokens == "1"]
    return "; ".join(
        f"{step.mode}, 1 row of 1 at {step.context}: {step.step_ms:.2f} ms, {step.ratio:.1f}x the bound"
        for step in shown
    )


class TargetBench:
    """Eager and captured engines on one model and one cache."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        began = time.perf_counter()
        model = sized_model(sizes.model, sizes.vocabulary, device)
        self._weights = weight_bytes(model)
        self._shape = attention_shape(model, PAGE_SIZE)
        attention, self._report = choose_attention(self._shape, device, max(sizes.contexts))
        decoder = decoder_for(model)
        load_s = time.perf_counter() - began
        self._sizes = sizes
        self._device = device
        self._bandwidth = copy_bandwidth(device)
        longest = max(sizes.contexts)
        needed = max(sizes.rows) * self._pages_each(longest)
        self._pages = needed
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self._pages = min(needed, int(CACHE_SHARE * torch.cuda.mem_get_info()[0]) // self._shape.page_bytes)
        eager = ModelRunner(
            model,
            self._pages,
            PAGE_SIZE,
            attention,
            decoder,
            is_checked=True,
            vocabulary=sizes.vocabulary,
        )
        fill_cache(eager.cache, self._shape)
        self._engines = {EAGER: TimedEngine(eager, sizes.vocabulary, device)}
        padded = capturable(attention, device)
        self.captures: Result = Unmeasured("captured steps", NOT_PADDED.format(attention.name))
        self._buckets = Buckets.for_sessions(max(sizes.rows), longest + self._largest, PAGE_SIZE, attention)
        if padded is not None:
            captured = ModelRunner(
                model,
                self._pages,
                PAGE_SIZE,
                padded,
                decoder,
                is_checked=True,
                cache=eager.cache,
                vocabulary=sizes.vocabulary,
                recording=Recording(self._buckets, capture_on(device)),
            )
            self.captures = self._capture(captured)
            if isinstance(self.captures, Captures):
                self._engines[CAPTURED] = TimedEngine(captured, sizes.vocabulary, device)
        self.model = TargetModel(
            sizes.model,
            self._weights,
            load_s,
            attention.name,
            None if padded is None else padded.name,
            self._pages * PAGE_SIZE,
            self._bandwidth,
        )
        self._random = random.Random(0)
        self._opened: set[tuple[str, int]] = set()

    @property
    def _largest(self) -> int:
        """Returns the number of tokens of the longest row."""
        return 1 + max(len(parents) for _, parents in self._sizes.shapes)

    def _pages_each(self, context: int) -> int:
        return -(-(context + self._largest) // PAGE_SIZE)

    def _capture(self, runner: ModelRunner) -> Result:
        on_gpu = self._device.type == "cuda"
        before = torch.cuda.memory_reserved() if on_gpu else 0
        began = time.perf_counter()
        runner.capture_steps()
        if not runner.is_captured:
            return Unmeasured("captured steps", CAPTURE_FAILED)
        synchronize(self._device)
        seconds = time.perf_counter() - began
        used = torch.cuda.memory_reserved() - before if on_gpu else None
        return Captures(len(self._buckets.shapes), seconds, used)

    def fault(self, case: Case) -> str:
        """Returns why a case cannot be measured here; empty if it can."""
        if case.rows * self._pages_each(case.context) > self._pages:
            return "its keys and values exceed the memory"
        is_tree = not DraftTree(tuple(range(len(case.parents))), case.parents).is_chain
        if is_tree and not self._report.takes_trees:
            return f"attention {self._report.chosen} takes no trees"
        return ""

    def is_capturable(self, case: Case) -> bool:
        return case.rows * (1 + len(case.parents)) <= self._buckets.tokens[-1]

    def measured(self, case: Case) -> Iterator[TargetStep]:
        """Yields the results of all modes."""
        times = step_times(self._engines_for(case), self._plan(case), self._sizes.repeats)
        cached_bytes = case.rows * (case.context + 1 + len(case.parents)) * self._shape.page_bytes // PAGE_SIZE
        floor_ms = 1e3 * (self._weights + cached_bytes) / self._bandwidth
        for mode, medians in times.items():
            yield TargetStep(
                mode,
                case.sampling,
                case.rows,
                case.tokens,
                case.context,
                medians.step_ms,
                medians.device_ms,
                medians.host_ms,
                medians.between_ms,
                floor_ms,
                medians.step_ms / floor_ms,
            )

    def is_counted(self, case: Case) -> bool:
        """Returns whether to count a case's launches, which depend little on rows and not on the context."""
        sizes = self._sizes
        return case.context == sizes.contexts[0] and case.rows in (sizes.rows[0], sizes.rows[-1])

    def launches(self, case: Case) -> Iterator[StepLaunches]:
        """Counts the launches in all modes."""
        plan = self._plan(case)
        for mode, engine in self._engines_for(case).items():
            counted = launches(partial(engine.step, plan), self._device)
            engine.forget()
            yield StepLaunches(
                mode, case.sampling, case.rows, case.tokens, case.context, counted.calls, counted.kernels
            )

    def _engines_for(self, case: Case) -> dict[str, TimedEngine]:
        return self._engines if self.is_capturable(case) else {EAGER: self._engines[EAGER]}

    def _plan(self, case: Case) -> StepPlan:
        """Returns a step of the case; opens its sessions when they first occur."""
        names = [f"{case.sampling} {case.context} {row}" for row in range(max(self._sizes.rows))]
        if (case.sampling, case.context) not in self._opened:
            self._opened.add((case.sampling, case.context))
            text = tuple(self._random.randrange(self._sizes.vocabulary) for _ in range(case.context))
            opens = tuple(
                Open.measured(name, text, case.context + 1000, self._largest, parameters(case.sampling, row))
                for row, name in enumerate(names)
            )
            for engine in self._engines.values():
                engine.step(StepPlan((), opens, ()))
                engine.forget()
        each = self._pages_each(case.context)
        rows = []
        for row, name in enumerate(names[: case.rows]):
            tokens = tuple(self._random.sample(range(self._sizes.vocabulary), k=1 + len(case.parents)))
            pages = tuple(range(each * row, each * (row + 1)))
            rows.append(Row(name, tokens, case.context, True, pages, DraftTree(tokens[1:], case.parents)))
        return StepPlan((), (), tuple(rows))


def parameters(sampling: str, row: int) -> Sampling:
    """Returns the parameters of a row; with DISTINCT, no two rows are alike, and most have top-k or top-p."""
    if sampling == GREEDY:
        return Sampling(temperature=0.0)
    if sampling == SAMPLED:
        return Sampling()
    temperature = 0.5 + row / 64
    if row % 3 == 0:
        return Sampling(temperature, top_k=20 + row)
    if row % 3 == 1:
        return Sampling(temperature, top_p=0.8 + row / 640)
    return Sampling(temperature)
