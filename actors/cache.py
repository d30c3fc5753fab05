"""The KV cache and the attention over it: one fixed place per session.

The simplest correct cache: a session owns a slot with room for the whole context, so rollback is feeding from
an earlier position. Modelling code reaches it through the attention function registered with transformers.
Knows nothing of sessions: it is told slots and positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION_NAME = "slipstream"


@dataclass(frozen=True, slots=True)
class FeedRow:
    """Tokens to feed into a slot at positions start, start + 1, ...; the last `logits` of them give logits."""

    slot: int
    tokens: tuple[int, ...]
    start: int
    logits: int


class SlotCache:
    """Keys and values of all layers, each of shape (slots, kv heads, context, head dim)."""

    def __init__(self, slots: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (slots, context)
        self._dtype, self._device = dtype, device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values; made on first use, when its shape is known (memory is touched when written)."""
        if index not in self._layers:
            slots, context = self._shape
            shape = (slots, kv_heads, context, head_dim)
            keys, values = (torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(2))
            self._layers[index] = (keys, values)
        return self._layers[index]


class RaggedBatch:
    """Rows of mixed lengths, flat: what one forward feeds, and where it goes in the cache."""

    def __init__(self, rows: Sequence[FeedRow], cache: SlotCache, device: torch.device) -> None:
        self.rows = rows
        self.cache = cache
        tokens = [token for row in rows for token in row.tokens]
        positions = [row.start + i for row in rows for i in range(len(row.tokens))]
        slots = [row.slot for row in rows for _ in row.tokens]
        self.tokens = torch.tensor(tokens, device=device)  # (total,)
        self.positions = torch.tensor(positions, device=device)  # (total,)
        self.slots = torch.tensor(slots, device=device)  # (total,)
        self._masks: dict[tuple[int, int, int, int | None], Tensor] = {}

    @property
    def logit_indices(self) -> list[int]:
        """Places in the flat batch whose logits are wanted."""
        found: list[int] = []
        end = 0
        for row in self.rows:
            end += len(row.tokens)
            found += range(end - row.logits, end)
        return found

    def mask(self, row: FeedRow, group: int, window: int | None) -> Tensor | None:
        """Which keys each query sees, (group x queries, keys); None: all. Made once per forward, for all layers."""
        queries, keys = len(row.tokens), row.start + len(row.tokens)
        if queries == 1 and (window is None or keys <= window):
            return None
        address = (queries, keys, group, window)
        if address not in self._masks:
            at = torch.arange(row.start, keys, device=self.tokens.device).unsqueeze(1)
            key_at = torch.arange(keys, device=self.tokens.device).unsqueeze(0)
            seen = key_at <= at
            if window is not None:
                seen &= key_at > at - window
            self._masks[address] = seen.repeat(group, 1)
        return self._masks[address]


def slot_attention(
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
    """Attention of every row over its own slot, as transformers' attention interface asks for it.

    Query heads that share a key head become further queries of it, so keys and values are never repeated.
    """
    assert ragged_batch is not None, "the model was called without a RaggedBatch"
    heads, total, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    group = heads // kv_heads
    keys, values = ragged_batch.cache.layer(int(module.layer_idx), kv_heads, head_dim)  # type: ignore[arg-type]
    keys[ragged_batch.slots, :, ragged_batch.positions] = key[0].transpose(0, 1)
    values[ragged_batch.slots, :, ragged_batch.positions] = value[0].transpose(0, 1)
    grouped = query[0].view(kv_heads, group, total, head_dim)
    out = torch.empty(total, heads, head_dim, dtype=query.dtype, device=query.device)
    begin = 0
    for row in ragged_batch.rows:
        count = len(row.tokens)
        q = grouped[:, :, begin : begin + count].reshape(1, kv_heads, group * count, head_dim)
        k = keys[row.slot, :, : row.start + count].unsqueeze(0)
        v = values[row.slot, :, : row.start + count].unsqueeze(0)
        mask = ragged_batch.mask(row, group, sliding_window)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        out[begin : begin + count] = attended.view(heads, count, head_dim).transpose(0, 1)
        begin += count
    return out.unsqueeze(0), None


def register_attention() -> None:
    """Makes `slot_attention` known to transformers under ATTENTION_NAME; registering again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
