"""Continuous batching over a static KV cache: sequences of different lengths advance together, one token per step.

A finished sequence's slot starts the next sequence at once, without padding or reallocation. A custom attention
function implements this, so it works with any decoder that uses the attention interface of transformers, with grouped
queries and without a sliding window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

ATTENTION = "slots"


class SlotCache:
    """Keys and values of every slot, and the number of filled positions in each."""

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, max_length, head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype)
        self.values = torch.zeros(shape, dtype=model.dtype)
        self.lengths = torch.zeros(slots, dtype=torch.long)
        self._rows = torch.arange(slots)
        self._bias = torch.empty(0)  # [slots, 1, max_length]: 0 up to a slot's length, -inf beyond

    def begin_step(self) -> None:
        """Builds the mask for a step that feeds each slot the token at position `lengths`."""
        beyond = torch.arange(self.keys.shape[3])[None] > self.lengths[:, None]
        self._bias = torch.zeros(beyond.shape, dtype=self.keys.dtype).masked_fill_(beyond, -torch.inf)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Stores one position and attends to all positions up to it. query [S, H, 1, D]; key, value [S, KV, 1, D].

        Computes over the whole cache, because slicing it to the longest slot would copy it.
        """
        slots, heads, _, dim = query.shape
        kv_heads = key.shape[1]
        keys = self.keys[layer]
        values = self.values[layer]
        keys[self._rows, :, self.lengths] = key[:, :, 0]
        values[self._rows, :, self.lengths] = value[:, :, 0]
        grouped = (query * scale).reshape(slots * kv_heads, heads // kv_heads, dim)
        scores = torch.bmm(grouped, keys.flatten(0, 1).transpose(1, 2))
        scores = scores.view(slots, heads, -1).add_(self._bias).softmax(dim=-1)
        mixed = torch.bmm(scores.view(slots * kv_heads, heads // kv_heads, -1), values.flatten(0, 1))
        return mixed.view(slots, 1, heads, dim)


def _slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slots: SlotCache,
    **_: object,
) -> tuple[Tensor, None]:
    return slots.attend(int(module.layer_idx), query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _slot_attention)


def feed(model: PreTrainedModel, cache: SlotCache, tokens: Tensor) -> Tensor:
    """Feeds one token to every slot; returns the last hidden states [slots, hidden]."""
    cache.begin_step()
    decoder = model.get_decoder()
    hidden = decoder(
        input_ids=tokens[:, None], position_ids=cache.lengths[:, None], use_cache=False, slots=cache
    ).last_hidden_state
    cache.lengths += 1
    return hidden[:, 0]
