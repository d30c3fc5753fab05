"""A decoding step over fixed buffers: padded to one of a few shapes, captured once per shape, and replayed.

On a GPU, launching the hundreds of operations of a step takes longer than computing them, so the step is captured as a
CUDA graph. A graph repeats its operations on the same memory. Therefore, all numbers of a step are packed into one
buffer, whose layout depends only on the step's shape, and no operation depends on a number's value.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.attention import AttentionBackend, PaddedBackend, StepShape
from actors.attention.batch import PackedStep, RaggedBatch
from actors.attention.select_backend import ChainsAndTrees
from actors.compute.capture import Capture, CudaCapture
from actors.compute.input_row import Integers
from actors.compute.kv_cache import InputRow, PagedCache
from actors.models.decoder import Decoder, ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws

log = logging.getLogger(__name__)

Step = Callable[[RaggedBatch], ForwardOutput]
"""Computes a batch's logits, then draws and accepts its tokens."""


TOKENS = (1, 2, 4, 8, *range(16, 64, 8), *range(64, 257, 16), 512)
ROW_TOKENS = 9  # longest row that shapes allow for, on average: a token and a block of eight


@dataclass(frozen=True, slots=True)
class Buckets:
    """Shapes to which steps are padded. Few shapes need few graphs; finer ones need less padding."""

    tokens: tuple[int, ...]  # ascending
    rows: int  # maximum number of rows
    pages: int  # maximum pages in a page table
    trees_apart: bool = False  # whether steps with trees have shapes of their own
    samples_apart: bool = True  # whether steps with sampled positions have shapes of their own

    @classmethod
    def for_sessions(
        cls,
        sessions: int,
        context: int,
        page_size: int,
        attention: AttentionBackend,
        tile: int = 1,
        draws: bool = True,
        verified: int = 0,
    ) -> "Buckets":
        """Covers steps of up to `sessions` rows, each with a block after up to `context` tokens.

        Steps have up to `verified` tokens, or nine per row if that is more. All numbers of tokens are multiples of
        `tile`. Without `draws`, no step samples.
        """
        most = min(max(sessions * ROW_TOKENS, verified), TOKENS[-1])
        sizes = {-(-size // tile) * tile for size in TOKENS[: bisect_left(TOKENS, most) + 1]}
        trees_apart = isinstance(attention, ChainsAndTrees)
        return cls(tuple(sorted(sizes)), sessions, -(-context // page_size), trees_apart, draws)

    def shape(self, rows: Sequence[InputRow], draws: Draws) -> StepShape | None:
        """Returns the smallest shape that holds these rows; None if none does, as for long prompts, or for texts beyond
        the context while costs are measured.
        """
        total = sum(len(row.tokens) for row in rows)
        at = bisect_left(self.tokens, total)
        if at == len(self.tokens) or len(rows) > self.rows or any(len(row.pages) > self.pages for row in rows):
            return None
        trees = self.trees_apart and any(row.parents for row in rows)
        return self._shape(self.tokens[at], bool(draws.sampled), trees)

    def _shape(self, tokens: int, samples: bool, trees: bool) -> StepShape:
        return StepShape(tokens, min(tokens, self.rows), self.pages, tokens, tokens if samples else 0, trees)

    @property
    def shapes(self) -> list[StepShape]:
        """All shapes, the largest first."""
        return [
            self._shape(tokens, samples, trees)
            for tokens in reversed(self.tokens)
            for samples in ((True, False) if self.samples_apart else (False,))
            for trees in ((True, False) if self.trees_apart else (False,))
        ]


class StepBuffer:
    """Host memory and device memory for the numbers of one shape's steps; one copy moves them all."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        total = sum(sizes)
        on_device = torch.empty(total, dtype=torch.int64, device=device)
        is_shared = device.type == "cpu"
        self._host = on_device if is_shared else torch.empty(total, dtype=torch.int64, pin_memory=True)
        self._numbers = self._host.numpy()
        self._on_device = on_device
        self._copied = None if is_shared else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.parts = torch.split(on_device, list(sizes))

    def write(self, lists: Sequence[Sequence[int] | Integers]) -> None:
        """Copies lists of the sizes of `parts` to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still read host memory
        np.concatenate([np.asarray(part, np.int64) for part in lists], out=self._numbers)
        if self._copied is not None:
            self._on_device.copy_(self._host, non_blocking=True)
            self._copied.record()


@dataclass(frozen=True, slots=True)
class Recording:
    """Shapes of the steps to capture, and how to capture them."""

    buckets: Buckets
    capture: Capture


def recording_on(
    device: torch.device, backend: AttentionBackend, decoder: Decoder, buckets: Buckets
) -> Recording | None:
    """Returns how to capture steps on a device; None where they run operation by operation.

    On a CPU, launching an operation costs next to nothing. Tensor-parallel ranks capture and replay alike, since a
    step's shape depends only on its rows and draws, which all ranks have; NCCL's collectives are part of the graph.
    """
    if device.type != "cuda":
        return None
    if not isinstance(backend, PaddedBackend):
        log.warning("steps run without CUDA graphs, which is slower: %s cannot be captured", backend.name)
        return None
    if fault := decoder.capture_fault((buckets.tokens[0], buckets.tokens[-1])):
        log.warning("steps run without CUDA graphs, which is slower: this model cannot be captured, as %s", fault)
        return None
    return Recording(buckets, CudaCapture())


class SharedOutput:
    """Memory for the output of one step at a time; otherwise, each captured step would keep logits of its own."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def keep(self, output: ForwardOutput) -> ForwardOutput:
        """Copies an output to this memory, which grows if the output is the largest so far."""
        parts = {name: part for name, part in output._asdict().items() if part is not None}
        return output._replace(**{name: self._kept(name, part) for name, part in parts.items()})

    def _kept(self, name: str, part: Tensor) -> Tensor:
        memory = self._parts.get(name)
        if memory is None or len(memory) < len(part):
            memory = self._parts[name] = torch.empty_like(part)
        return memory[: len(part)].copy_(part)


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    buffer: StepBuffer
    batch: RaggedBatch
    repeat: Callable[[], ForwardOutput]


class StaticStep:
    """Runs decoding steps that fit in the buckets of a recording, after capturing each shape."""

    def __init__(self, step: Step, cache: PagedCache, backend: PaddedBackend, recording: Recording) -> None:
        self._step = step
        self._cache = cache
        self._backend = backend
        self._buckets = recording.buckets
        self._capture = recording.capture
        self._captured: dict[StepShape, _CapturedStep] = {}
        self._output = SharedOutput()

    def shape(self, rows: Sequence[InputRow], draws: Draws) -> StepShape | None:
        """Returns the shape of a step; None if none holds it."""
        return self._buckets.shape(rows, draws)

    def run(self, rows: Sequence[InputRow], draws: Draws, shape: StepShape) -> tuple[Tensor, ForwardOutput]:
        """Runs a step of a captured shape; returns the slots that it wrote, and its output. The next step overwrites
        both, except `hidden`, which drafters keep.
        """
        captured = self._captured[shape]
        captured.buffer.write(PackedStep.padded(rows, self._cache, self._backend, shape, draws).integers)
        output = captured.repeat()
        total = sum(len(row.tokens) for row in rows)
        output = output.first(total, sum(row.logits for row in rows))
        if output.hidden is not None:
            output = output._replace(hidden=output.hidden.clone())
        return captured.batch.written[:total], output

    def capture(self, shape: StepShape) -> None:
        """Captures a shape unless it is captured already; overwrites no page. Raises RuntimeError if this fails.

        First captures the largest shape, whose memory serves all others.
        """
        if shape in self._captured:
            return
        for each in (self._buckets.shapes[0], shape):
            if each not in self._captured:
                self._captured[each] = self._captured_step(each)

    def _captured_step(self, shape: StepShape) -> _CapturedStep:
        packed = PackedStep.padded((), self._cache, self._backend, shape, NO_DRAWS)
        buffer = StepBuffer([len(part) for part in packed.integers], self._cache.device)
        buffer.write(packed.integers)
        batch = RaggedBatch(packed, buffer.parts)
        compute, shared = self._step, self._output  # no reference to self, so that reference counts free the graph

        def step() -> ForwardOutput:
            batch.place()
            return shared.keep(compute(batch))

        return _CapturedStep(buffer, batch, self._capture(step))

    def capture_all(self) -> None:
        """Captures all shapes before serving, as `capture` does."""
        for shape in self._buckets.shapes:
            self.capture(shape)
