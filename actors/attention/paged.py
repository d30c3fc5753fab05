"""Attention by this project's Triton kernel: pages in place, chains and trees, and padded steps of fixed shape.

The kernel reads a step from `StepTensors` only, so a captured CUDA graph can replay it: sizes and grid depend on the
tensors' shapes, never on their contents. `PagedPlan` fills these tensors from a step's rows.

Triton comes with torch's CUDA builds. Only `paged_for` imports it, and only for a GPU or Triton's interpreter
(TRITON_INTERPRET=1).
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from actors.attention import ScoreOptions, StepShape, StepSizes
from actors.attention.flat_rows import WORDS, FlatRows, padded
from actors.compute.input_row import Integers
from actors.compute.kv_cache import InputRow, PagedCache

WORKSPACE_BYTES = 256 << 20  # limit on partial results; beyond it, each program processes all splits of its queries


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """Rows of one step on the device: int64 tensors, padded to any number of tokens, rows and pages.

    Padding tokens come last and have zeros; padding rows come last and start at the number of real tokens. Entries of
    the block table beyond a row's end are never read.
    """

    positions: Tensor  # (tokens,): position of each token
    prefixes: Tensor  # (tokens,): number of leading slots that the token attends to, all of them
    stops: Tensor  # (tokens,): the token's own slot + 1; 0 for padding, whose result is 0
    ancestors: Tensor  # (tokens, WORDS): bit i % WORD of word i // WORD is set if the token attends to slot prefix + i
    row_starts: Tensor  # (rows + 1,): each row's first token, then the number of real tokens
    block_table: Tensor  # (rows, pages): pages of each row, in order


def step_integers(flat: FlatRows, sizes: StepSizes) -> list[Integers]:
    """Returns the contents of `StepTensors`, flat and in order, with padding to `sizes`."""
    block_table = np.zeros((sizes.rows, sizes.pages), np.int64)
    rows, pages = flat.tables.shape
    assert rows <= sizes.rows, "more rows than the step has"
    block_table[:rows, :pages] = flat.tables
    return [
        padded(flat.positions, sizes.tokens),
        padded(flat.prefixes, sizes.tokens),
        padded(flat.slots + 1, sizes.tokens),
        padded(flat.ancestors.ravel(), sizes.tokens * WORDS),
        padded(flat.starts, sizes.rows + 1, len(flat)),
        block_table.ravel(),
    ]


def step_tensors(parts: Sequence[Tensor], sizes: StepSizes) -> StepTensors:
    """Returns views of device tensors that hold the lists of `step_integers`."""
    positions, prefixes, stops, ancestors, row_starts, block_table = parts
    return StepTensors(
        positions, prefixes, stops, ancestors.view(-1, WORDS), row_starts, block_table.view(sizes.rows, sizes.pages)
    )


def parts_at(parts: Sequence[Tensor], positions: Tensor, ends: Tensor) -> list[Tensor]:
    """Returns the parts of `step_integers` for the same rows of one token, at other positions, (tokens,).

    `ends` are the positions + 1, and 0 for padding. The block table must reach the positions.
    """
    return [positions, ends, ends, *parts[3:]]


class AttendStep(Protocol):
    """Signature of `paged_kernel.attend`."""

    def __call__(
        self, step: StepTensors, query: Tensor, pool: Tensor, page_size: int, options: ScoreOptions
    ) -> Tensor: ...


class Paged:
    """Backend over a kernel."""

    name = "paged"
    takes_trees = True

    def __init__(self, attend: AttendStep) -> None:
        self._attend = attend

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> "PagedPlan":
        flat = FlatRows(rows, cache.page_size)
        return PagedPlan(flat, cache.page_size, StepSizes.of(flat), self._attend)

    def padded_plan(self, flat: FlatRows, cache: PagedCache, shape: StepShape) -> "PagedPlan":
        return PagedPlan(flat, cache.page_size, shape, self._attend)


class PagedPlan:
    """Makes one call per layer for all rows, padded to `sizes`."""

    def __init__(self, flat: FlatRows, page_size: int, sizes: StepSizes, attend: AttendStep) -> None:
        self._attend = attend
        self._page_size = page_size
        self._sizes = sizes
        self.integers = step_integers(flat, sizes)

    def place(self, parts: Sequence[Tensor]) -> None:
        self._step = step_tensors(parts, self._sizes)

    def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        return self._attend(self._step, query, pool, self._page_size, options)


def paged_for(device: torch.device) -> Paged:
    """Creates the backend. Raises ImportError without Triton, RuntimeError for GPUs that cannot multiply bfloat16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise RuntimeError("the kernel needs compute capability 8.0; use flashinfer")
    return Paged(importlib.import_module("actors.attention.paged_kernel").attend)
