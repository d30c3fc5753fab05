"""Attention by torch's variable-length attention with block tables: FlashAttention over pages in place.

torch supports block tables only with FlashAttention 3 (compute capability 9.0) or 4 (10.0). Each is a separate package.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from actors.attention import ScoreOptions, StepShape, StepSizes, pages_of
from actors.attention.flat_rows import FlatRows
from actors.attention.paged import step_integers, step_tensors
from actors.compute.kv_cache import InputRow, PagedCache

IMPLEMENTATION = {9: "FA3", 10: "FA4"}  # FlashAttention version by major compute capability


class Varlen:
    """Backend over a `kernel` with the signature of torch's varlen_attn."""

    name = "varlen"
    takes_trees = False

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> "VarlenPlan":
        flat = FlatRows(rows, cache.page_size)
        longest = max(len(row.tokens) for row in rows)
        most_keys = max(row.end for row in rows)
        return VarlenPlan(flat, cache.page_size, StepSizes.of(flat), self._kernel, longest, most_keys)

    def padded_plan(self, flat: FlatRows, cache: PagedCache, shape: StepShape) -> "VarlenPlan":
        return VarlenPlan(flat, cache.page_size, shape, self._kernel, shape.tokens, shape.pages * cache.page_size)


class VarlenPlan:
    """Makes one call per layer for all rows, padded to `sizes`; padding tokens are a further row without keys."""

    def __init__(
        self,
        flat: FlatRows,
        page_size: int,
        sizes: StepSizes,
        kernel: Callable[..., Any],
        max_queries: int,  # upper bounds on any row's queries and keys; the kernel sizes its grid by them
        max_keys: int,
    ) -> None:
        assert not flat.ancestors.any(), "this kernel supports only chains"
        self._kernel = kernel
        self._page_size = page_size
        self._sizes = sizes
        self._max_queries = max_queries
        self._max_keys = max_keys
        self.integers = step_integers(flat, sizes)

    def place(self, parts: Sequence[Tensor]) -> None:
        step = step_tensors(parts, self._sizes)
        ends = step.stops[step.row_starts[1:] - 1]  # a row's last token attends to all its keys
        # Kernels read tables and lengths in wide words, so each tensor needs an aligned address, which `pad` gives it.
        self._begins = F.pad(step.row_starts.to(torch.int32), (0, 1), value=self._sizes.tokens)
        self._used = F.pad(ends.to(torch.int32), (0, 1))
        self._tables = F.pad(step.block_table.to(torch.int32), (0, 0, 0, 1))

    def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        assert options.is_plain, "this kernel supports only plain scores"
        keys, values = pages_of(pool, self._page_size)
        window = options.window
        attended: Tensor = self._kernel(
            query,
            keys,
            values,
            self._begins,
            None,  # unused with a block table
            self._max_queries,
            self._max_keys,
            scale=options.scaling,
            window_size=(-1 if window is None else window - 1, 0),  # excludes the query's own key
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=self._used,
            block_table=self._tables,
        )
        return attended


def varlen_for(device: torch.device) -> Varlen:
    """Creates the backend. Raises RuntimeError or ImportError if the device has no paged kernel."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in IMPLEMENTATION:
        raise RuntimeError(f"compute capability {major}.{minor} has no paged FlashAttention; use flashinfer")
    activate_flash_attention_impl(IMPLEMENTATION[major])
    return Varlen(varlen_attn)
