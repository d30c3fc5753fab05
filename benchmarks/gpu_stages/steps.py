"""Models, runners and clocks that the stages share."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from random_pair import SIZES, config_of, random_model
from torch.autograd.profiler_util import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from actors.attention import AttentionBackend, PaddedBackend
from actors.attention.padded import PaddedSdpa
from actors.attention.select_backend import AttentionShape
from actors.compute.capture import CallCapture, Capture, CudaCapture
from actors.compute.kv_cache import InputRow, PagedCache
from actors.engine.executor import StepExecutor
from actors.engine.runner import Runner
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.page_allocator import PageCopy, SlotMove
from cluster.verification.step import StepPlan

PAGE_SIZE = 16
EAGER, CAPTURED = "eager", "captured"
CAPTURE_FAILED = "a capture failed, so steps run eagerly; see the log"
NOT_PADDED = "attention {} has no plans of fixed shape, so its steps cannot be captured"
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
WARM_UPS = 3
RUNTIME_CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")  # beginnings of names


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device) -> float:
    """Returns the best bandwidth of ten copies, counting both reads and writes, in bytes per second."""
    source, to = (torch.zeros(COPIED_BYTES[device.type], dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        to.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * len(source) / best


@torch.inference_mode()
def sized_model(
    size: str, vocabulary: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Returns a model of one of random_pair's sizes, with random weights."""
    return random_model(config_of(size, vocabulary, SIZES[size]["num_hidden_layers"]), device).to(dtype)


def weight_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of the weights that each step reads: all but an untied embedding."""
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if not model.config.tie_word_embeddings:
        embedding = model.get_input_embeddings().weight
        weights -= embedding.numel() * embedding.element_size()
    return int(weights)


@torch.inference_mode()
def fill_cache(cache: PagedCache, shape: AttentionShape) -> None:
    """Fills all layers with random keys and values, so that no prompt must be computed."""
    for layer in shape.sizes:
        cache.layer(layer)[: cache.padding_slot].normal_()


def capturable(attention: AttentionBackend, device: torch.device) -> PaddedBackend | None:
    """Returns the attention of captured steps; None if `attention` cannot be captured on this GPU."""
    if isinstance(attention, PaddedBackend):
        return attention
    return PaddedSdpa() if device.type == "cpu" else None


def capture_on(device: torch.device) -> Capture:
    return CudaCapture() if device.type == "cuda" else CallCapture()


# ---------------------------------------------------------------- times


class Marks(Protocol):
    """Timestamps on the device's clock."""

    def mark(self) -> Any: ...

    def ms(self, before: Any, after: Any) -> float: ...


class GpuMarks:
    """Records CUDA events in the current stream."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, before: Any, after: Any) -> float:
        after.synchronize()
        return float(before.elapsed_time(after))


class CpuMarks:
    """Reads the host clock; CPU operations are synchronous."""

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, before: Any, after: Any) -> float:
        return float(1e3 * (after - before))


@dataclass(frozen=True)
class StepTimes:
    """Medians of one kind of step, in milliseconds."""

    step_ms: float  # until the decisions are on the host
    device_ms: float  # from the first operation of the forward to its last, on the device's clock
    host_ms: float  # until the host has launched the forward
    between_ms: float  # from the last operation of a forward to the first of the next, on the device's clock


class MarkedRunner:
    """Records the start and end of each forward, on the clocks of host and device."""

    def __init__(self, runner: Runner, marks: Marks) -> None:
        self.vocabulary = runner.vocabulary
        self._runner = runner
        self._marks = marks
        self.forwards: list[tuple[Any, Any]] = []
        self.host_s: list[float] = []

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        *,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        began_s = time.perf_counter()
        began = self._marks.mark()
        output = self._runner.forward(rows, copies, moves=moves, draws=draws)
        self.forwards.append((began, self._marks.mark()))
        self.host_s.append(time.perf_counter() - began_s)
        return output

    def read_states(self, slots: Sequence[int]) -> bytes:
        return self._runner.read_states(slots)


class TimedEngine:
    """An executor on a runner, and the times of its steps."""

    def __init__(self, runner: Runner, vocabulary: int, device: torch.device) -> None:
        self._marks: Marks = GpuMarks() if device.type == "cuda" else CpuMarks()
        self._runner = MarkedRunner(runner, self._marks)
        self._executor = StepExecutor(self._runner, vocabulary)
        self._step_s: list[float] = []

    def step(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        self._executor.step(plan)  # returns once the decisions are on the host
        self._step_s.append(time.perf_counter() - began)

    def forget(self) -> None:
        """Drops all times."""
        self._step_s.clear()
        self._runner.forwards.clear()
        self._runner.host_s.clear()

    def times(self) -> StepTimes:
        """Returns the medians since the last `forget`, of at least two consecutive steps."""
        forwards = self._runner.forwards
        ms = self._marks.ms
        return StepTimes(
            step_ms=1e3 * statistics.median(self._step_s),
            device_ms=statistics.median([ms(*forward) for forward in forwards]),
            host_ms=1e3 * statistics.median(self._runner.host_s),
            between_ms=statistics.median([ms(first[1], second[0]) for first, second in pairwise(forwards)]),
        )


def step_times(engines: Mapping[str, TimedEngine], plan: StepPlan, repeats: int) -> dict[str, StepTimes]:
    """Times a plan on all engines, in alternating series of consecutive steps."""
    for engine in engines.values():
        for _ in range(WARM_UPS):
            engine.step(plan)
        engine.forget()
    found: dict[str, list[StepTimes]] = {name: [] for name in engines}
    for _ in range(2):
        for name, engine in engines.items():
            for _ in range(max(2, repeats // 2)):
                engine.step(plan)
            found[name].append(engine.times())
            engine.forget()
    return {
        name: StepTimes(*map(statistics.mean, zip(*map(_values, some), strict=True))) for name, some in found.items()
    }


def _values(times: StepTimes) -> tuple[float, ...]:
    return times.step_ms, times.device_ms, times.host_ms, times.between_ms


def alternating_ms(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the median milliseconds of functions that run alternately and return once the device is done."""
    for run in sides.values():
        for _ in range(WARM_UPS):
            run()
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            found[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(some) for name, some in found.items()}


# ---------------------------------------------------------------- launches


@dataclass(frozen=True)
class Launches:
    """Launches of one step."""

    calls: int  # on a GPU, calls that launch a kernel, a graph or a copy; on a CPU, operations of torch
    kernels: int | None  # kernels and copies that the GPU executes; None on a CPU


class _Count(TorchDispatchMode):
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def launches(run: Callable[[], object], device: torch.device) -> Launches:
    """Counts the launches of one run, with torch's profiler on a GPU."""
    if device.type != "cuda":
        with _Count() as count:
            run()
        return Launches(count.operations, None)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        synchronize(device)
    on_gpu = [event.device_type == DeviceType.CUDA for event in profile.events()]
    calls = [event.name.startswith(RUNTIME_CALLS) for event in profile.events()]
    return Launches(sum(call and not gpu for call, gpu in zip(calls, on_gpu, strict=True)), sum(on_gpu))
