"""Attention by torch's variable-length attention with block tables: FlashAttention over pages in place.

torch supports block tables only with FlashAttention 3 (compute capability 9.0) or 4 (10.0). Each is a separate package.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from actors.attention import ScoreOptions, pages_of
from actors.compute.kv_cache import InputRow, PagedCache

IMPLEMENTATION = {9: "FA3", 10: "FA4"}  # FlashAttention version by major compute capability


class Varlen:
    """Backend over a `kernel` with the signature of torch's varlen_attn."""

    name = "varlen"
    takes_trees = False

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> "VarlenPlan":
        return VarlenPlan(rows, cache, self._kernel)


class VarlenPlan:
    """Makes one call per layer for all rows."""

    def __init__(self, rows: Sequence[InputRow], cache: PagedCache, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel
        self._page_size = cache.page_size
        used = [row.pages[: -(-row.end // cache.page_size)] for row in rows]
        width = max(len(pages) for pages in used)
        begins = [0, *accumulate(len(row.tokens) for row in rows)]
        tables = [page for pages in used for page in (*pages, *[0] * (width - len(pages)))]
        self.integers = [[*begins, *(row.end for row in rows), *tables]]
        self._rows = len(rows)
        self._max_queries = max(len(row.tokens) for row in rows)
        self._max_keys = max(row.end for row in rows)

    def place(self, parts: Sequence[Tensor]) -> None:
        numbers = parts[0].to(torch.int32)
        rows = self._rows
        self._begins = numbers[: rows + 1]
        # Kernels read tables and lengths in wide words, so each tensor needs an aligned address.
        self._used = numbers[rows + 1 : 2 * rows + 1].clone()
        self._tables = numbers[2 * rows + 1 :].view(rows, -1).clone()

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
