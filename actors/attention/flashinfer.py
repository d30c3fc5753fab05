"""Attention by FlashInfer (extra `flashinfer`): ragged queries over pages in place.

FlashInfer makes one plan on the host per shape, scale and window; layers with equal values share it.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from actors.attention import ScoreOptions, pages_of
from actors.compute.kv_cache import InputRow, PagedCache

WORKSPACE_BYTES = 128 << 20  # size recommended by FlashInfer


@dataclass(frozen=True, slots=True)
class _Shape:
    """Properties of a layer that determine its plan."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scaling: float | None
    window: int | None
    masked: bool  # a wrapper's first plan selects its kernel, and not all kernels support masks


class FlashInfer:
    """Backend over the module flashinfer (`library`)."""

    name = "flashinfer"
    takes_trees = True

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Shape, Any] = {}

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> "FlashInferPlan":
        return FlashInferPlan(rows, cache, self)

    def wrapper(self, shape: _Shape) -> Any:
        """Returns a shape's wrapper, reused across steps. Wrappers run in sequence, so they share one workspace."""
        if shape not in self._wrappers:
            make = self._library.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[shape] = make(self._workspace, "NHD")
        return self._wrappers[shape]


class FlashInferPlan:
    """Makes one call per layer for all rows; the first layer of a shape makes the plan for all of them.

    FlashInfer plans on the host and copies its integers itself.
    """

    integers: Sequence[Sequence[int]] = ()

    def __init__(self, rows: Sequence[InputRow], cache: PagedCache, backend: FlashInfer) -> None:
        self._backend = backend
        self._page_size = cache.page_size
        used = [row.pages[: -(-row.end // cache.page_size)] for row in rows]
        self._rows = rows
        self._device = cache.device
        self._has_trees = any(row.parents for row in rows)
        pinned = cache.device.type == "cuda"
        lists = [
            torch.tensor(numbers, dtype=torch.int32, pin_memory=pinned)
            for numbers in (
                [0, *accumulate(len(row.tokens) for row in rows)],  # start of each row's queries
                [0, *accumulate(map(len, used))],  # start of each row's pages
                [page for pages in used for page in pages],
                [row.end - (len(pages) - 1) * cache.page_size for row, pages in zip(rows, used, strict=True)],
            )
        ]
        # With a custom mask, FlashInfer derives further lists on the device.
        self._lists = [numbers.to(cache.device) for numbers in lists] if self._has_trees else lists
        self._planned: dict[_Shape, Any] = {}

    def place(self, parts: Sequence[Tensor]) -> None:
        """Does nothing: FlashInfer copies its own integers."""

    def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        assert options.is_plain, "this kernel supports only plain scores"
        heads, head_dim = query.shape[1:]
        kv_heads = pool.shape[1] // 2
        shape = _Shape(heads, kv_heads, head_dim, query.dtype, options.scaling, options.window, self._has_trees)
        if shape not in self._planned:
            self._planned[shape] = self._plan(shape)
        attended: Tensor = self._planned[shape].run(query, pages_of(pool, self._page_size))
        return attended

    def _plan(self, shape: _Shape) -> Any:
        wrapper = self._backend.wrapper(shape)
        if shape.masked:  # windows count positions, and a tree node's position differs from its slot
            masks = [visible_keys(row, shape.window).flatten() for row in self._rows]
            seen: dict[str, Any] = {"custom_mask": torch.cat(masks).to(self._device)}
        else:
            # FlashInfer's window excludes the query's own key.
            seen = {"causal": True, "window_left": -1 if shape.window is None else shape.window - 1}
        wrapper.plan(
            *self._lists,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            self._page_size,
            sm_scale=shape.scaling,
            q_data_type=shape.dtype,
            **seen,
        )
        return wrapper


def visible_keys(row: InputRow, window: int | None) -> Tensor:
    """Returns the mask of slots visible to each token of a row, (tokens, slots)."""
    positions = torch.tensor([*range(row.start), *row.positions])
    slots = torch.arange(row.end)
    seen = slots <= torch.tensor(row.seen).unsqueeze(1)
    first = len(row.tokens) - len(row.parents)
    for node, path in enumerate(row.tree.paths):
        seen[first + node, [row.tree_start + passed for passed in path]] = True
    if window is not None:
        seen &= positions[row.start :].unsqueeze(1) - positions < window
    return seen


def flashinfer_for(device: torch.device) -> FlashInfer:
    """Creates the backend. Raises ImportError if FlashInfer is not installed."""
    return FlashInfer(importlib.import_module("flashinfer"), device)
