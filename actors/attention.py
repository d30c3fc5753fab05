"""Attention over the paged cache, and its registration as an attention function of transformers.

Knows nothing of sessions: a batch says where its rows' keys and values are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from actors.cache import RaggedBatch, RowGroup

ATTENTION_NAME = "slipstream"


def attend(
    batch: RaggedBatch,
    layer: int,
    query: Tensor,  # (total, heads, head dim)
    key_value: Tensor,  # (total, 2 x kv heads, head dim): keys, then values
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Caches the new keys and values and attends each row to its own; shape (total, heads x head dim)."""
    total, heads, head_dim = query.shape
    kv_heads = key_value.shape[1] // 2
    pool = batch.cache.layer(layer, kv_heads, head_dim)
    pool.index_copy_(0, batch.written, key_value)
    if len(batch.groups) == 1 and batch.groups[0].query_at is None:
        return _attend_group(batch, 0, query, pool, scaling, window).reshape(total, -1)
    out = torch.empty(total, heads, head_dim, dtype=query.dtype, device=query.device)
    for index, group in enumerate(batch.groups):
        assert group.query_at is not None, "a group that is the whole batch has no others beside it"
        attended = _attend_group(batch, index, query[group.query_at], pool, scaling, window)
        if group.real is None:
            out.index_copy_(0, group.query_at, attended)
        else:
            out.index_copy_(0, group.query_at[group.real], attended[group.real])
    return out.view(total, -1)


def _attend_group(
    batch: RaggedBatch, index: int, query: Tensor, pool: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """query and result: (count x queries, heads, head dim).

    Query heads that share a key head become further queries of it, so keys and values are never repeated.
    """
    rows = batch.groups[index]
    heads, head_dim = query.shape[1:]
    kv_heads = pool.shape[1] // 2
    repeat = heads // kv_heads
    keys, values = _gather(rows, pool).unbind(2)  # each (count, keys, kv heads, head dim)
    grouped = query.view(rows.count, rows.queries, kv_heads, repeat, head_dim).permute(0, 2, 3, 1, 4)
    attended = F.scaled_dot_product_attention(
        grouped.reshape(rows.count, kv_heads, repeat * rows.queries, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=batch.mask(index, repeat, window),
        scale=scaling,
    )
    apart = attended.view(rows.count, kv_heads, repeat, rows.queries, head_dim).permute(0, 3, 1, 2, 4)
    return apart.reshape(-1, heads, head_dim)


def _gather(rows: RowGroup, pool: Tensor) -> Tensor:
    """The group's keys and values, (count, keys, 2, kv heads, head dim); a view where they lie together."""
    found = pool[rows.key_at] if isinstance(rows.key_at, slice) else pool.index_select(0, rows.key_at)
    return found.view(rows.count, rows.keys, 2, pool.shape[1] // 2, pool.shape[2])


def paged_attention(
    module: nn.Module,
    query: Tensor,  # (1, heads, total, head dim)
    key: Tensor,  # (1, kv heads, total, head dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    ragged_batch: RaggedBatch | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`attend` as transformers' attention interface asks for it."""
    assert ragged_batch is not None, "the model was called without a RaggedBatch"
    key_value = torch.cat([key[0], value[0]]).transpose(0, 1)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = attend(ragged_batch, layer, query[0].transpose(0, 1), key_value, scaling, sliding_window)
    return out.view(1, query.shape[2], query.shape[1], query.shape[3]), None


def register_attention() -> None:
    """Makes `paged_attention` known to transformers under ATTENTION_NAME; registering again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
