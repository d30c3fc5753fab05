"""Slow reference versions of the libraries' documented attention kernels, for any device.

They reject the same arguments as the real kernels, so wrong arguments show without a GPU.
"""

import inspect
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


def attend_to_pages(
    query: Tensor,  # (queries, heads, head dim)
    keys: Tensor,  # (pages, page size, kv heads, head dim)
    values: Tensor,
    pages: Tensor,
    length: int,
    scale: float | None,
    window_left: int,  # visible keys before the query's own; -1: all
    mask: Tensor | None = None,  # (queries, keys): visible keys, instead of causality and window
) -> Tensor:
    """Computes one row's attention, aligned at the lower right: the last query sees the last key."""
    repeat = query.shape[1] // keys.shape[2]
    own_keys, own_values = (
        part[pages.long()].flatten(0, 1)[:length].repeat_interleave(repeat, dim=1) for part in (keys, values)
    )
    scores = torch.einsum("qhd,khd->hqk", query, own_keys) * (scale or 1 / math.sqrt(query.shape[2]))
    distance = torch.arange(length - len(query), length).unsqueeze(1) - torch.arange(length)
    hidden = (distance < 0) if window_left < 0 else (distance < 0) | (distance > window_left)
    if mask is not None:
        hidden = ~mask
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), own_values)


def check_integers(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype is torch.int32
        assert tensor.is_contiguous()


def varlen(*arguments: Any, **more: Any) -> Tensor:
    """Reference of torch.nn.attention.varlen.varlen_attn with a block table."""
    given = inspect.signature(varlen_attn).bind(*arguments, **more).arguments
    query = given["query"]
    keys = given["key"]
    values = given["value"]
    begins = given["cu_seq_q"]
    used = given["seqused_k"]
    tables = given["block_table"]
    (left, right) = given["window_size"]
    check_integers(begins, used, tables)
    assert given["cu_seq_k"] is None, "it and a block table exclude each other"
    assert right == 0, "not causal"
    assert given["enable_gqa"] == (query.shape[1] != keys.shape[2])
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    counts = begins.diff().tolist()
    assert given["max_q"] >= max(counts)
    assert given["max_k"] >= int(used.max())
    parts = zip(query.split(counts), tables, used.tolist(), strict=True)
    return torch.cat([attend_to_pages(q, keys, values, t, n, given["scale"], left) for q, t, n in parts])


def exactly_bounded_varlen(*arguments: Any, **more: Any) -> Tensor:
    """Computes `varlen`; asserts the exact bounds of an unpadded step."""
    given = inspect.signature(varlen_attn).bind(*arguments, **more).arguments
    assert given["max_q"] == int(given["cu_seq_q"].diff().max())
    assert given["max_k"] == int(given["seqused_k"].max())
    return varlen(*arguments, **more)


class PagedPrefill:
    """Reference of flashinfer.BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        check_integers(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert causal == (custom_mask is None), "a mask takes the place of causal"
        assert custom_mask is None or window_left == -1
        counts = paged_kv_indptr.diff()
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        self.queries = qo_indptr.diff().tolist()
        self.pages = paged_kv_indices.split(counts.tolist())
        self.lengths = ((counts - 1) * page_size + paged_kv_last_page_len).tolist()
        self.masks: list[Tensor | None] = [None] * len(self.queries)
        if custom_mask is not None:
            assert custom_mask.dtype is torch.bool
            sizes = list(zip(self.queries, self.lengths, strict=True))
            flat = custom_mask.split([queries * keys for queries, keys in sizes])
            self.masks = [part.view(size) for part, size in zip(flat, sizes, strict=True)]
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type)
        self.scale = sm_scale
        self.window_left = window_left

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1], q.dtype) == self.heads
        assert keys.stride() == values.stride()
        assert q.stride(-1) == keys.stride(-1) == 1
        parts = zip(q.split(self.queries), self.pages, self.lengths, self.masks, strict=True)
        rows = [attend_to_pages(part, keys, values, p, n, self.scale, self.window_left, m) for part, p, n, m in parts]
        return torch.cat(rows)


FLASHINFER = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PagedPrefill)
