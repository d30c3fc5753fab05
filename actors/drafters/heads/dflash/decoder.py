"""Forward of a DFlash head: one block for each of several sessions, computed together.

A block is the last decided token followed by masks, each at its own position. Its queries attend to keys and values of
the context, which every layer computes from the same projected states of the target, and to those of the block itself.
Place j of the block, counted from 1, predicts the token at that place.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.drafters.heads.dflash.config import DFlashConfig, DFlashLayerKind
from actors.drafters.heads.dflash.context import DFlashContext
from actors.drafters.heads.dflash.weights import DFlashLayer, DFlashWeights
from actors.models.decoder import Rotation, rotation_of


class _Step(NamedTuple):
    """Inputs of a forward other than the blocks."""

    contexts: Sequence[DFlashContext]
    starts: Sequence[int]  # position of each block's first place
    states: Tensor  # (rows, hidden): the unread states of all contexts
    counts: list[int]  # rows of `states` by context
    rotation: Rotation  # for the positions of the states, then of the blocks


class DFlashDecoder:
    """Decoder whose layers are described by `config`."""

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, rotary: nn.Module) -> None:
        self.config = config
        self.token_ids = weights.token_ids  # (columns,) of the target, by column of the logits
        self.like = weights.mask_embedding  # rows have its type and device
        self._weights = weights
        self._rotary = rotary

    def project(self, rows: Tensor) -> Tensor:
        """Projects the target's states, (rows, width), to context rows, (rows, hidden)."""
        return self._weights.row_projection(rows)

    def hidden(self, contexts: Sequence[DFlashContext], anchors: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Returns the hidden states behind the logits, (sessions, block, hidden).

        Each session's block begins with its anchor at position `start`; all states before that must have arrived.
        """
        hidden = self._embedded(anchors)
        step = self._step(contexts, starts)
        for index, layer in enumerate(self._weights.layers):
            hidden = layer.attention_out.plus(self._attended(index, layer.attention_norm(hidden), step), hidden)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = layer.down.plus(F.silu(gate) * up, hidden)
        return self._weights.norm(hidden).view(len(contexts), self.config.block_size, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits (..., columns) for hidden states (..., hidden)."""
        logits = self._weights.lm_head(hidden) * self.config.logit_scale
        cap = self.config.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _embedded(self, anchors: Sequence[int]) -> Tensor:
        """Returns the embeddings of all blocks, one after the other, (rows, hidden)."""
        weights = self._weights
        blocks = weights.mask_embedding.repeat(len(anchors), self.config.block_size, 1)
        blocks[:, 0] = F.embedding(torch.tensor(anchors, device=blocks.device), weights.embedding)
        return blocks.flatten(0, 1) * self.config.embedding_scale

    def _step(self, contexts: Sequence[DFlashContext], starts: Sequence[int]) -> _Step:
        """Builds the step, taking the unread states of the contexts."""
        size = self.config.block_size
        before = [torch.arange(context.read, start) for context, start in zip(contexts, starts, strict=True)]
        within = [torch.arange(start, start + size) for start in starts]
        positions = torch.cat([*before, *within]).to(self.like.device)
        unread = [context.take(start) for context, start in zip(contexts, starts, strict=True)]
        states = torch.cat([self.like.new_empty((0, self.config.hidden)), *[rows for rows in unread if len(rows)]])
        rotation = rotation_of(self._rotary, self.like, positions)
        return _Step(contexts, starts, states, [len(each) for each in before], rotation)

    def _attended(self, index: int, inputs: Tensor, step: _Step) -> Tensor:
        """Returns the layer's attention output for all blocks, (rows, heads x dim)."""
        layer = self._weights.layers[index]
        size = self.config.block_size
        query = torch.split(self._query(layer, inputs, step.rotation), size)
        key_value = self._key_value(layer, torch.cat([step.states, inputs]), step.rotation)
        of_states = torch.split(key_value[: len(step.states)], step.counts)
        of_block = torch.split(key_value[len(step.states) :], size)
        pieces = zip(step.contexts, step.starts, of_states, query, of_block, strict=True)
        kind = self.config.layers[index]
        return torch.cat([_attend(context, start, index, kind, *piece) for context, start, *piece in pieces])

    def _query(self, layer: DFlashLayer, inputs: Tensor, rotation: Rotation) -> Tensor:
        """Returns queries, (rows, heads, dim); the rows are the last ones of the rotation."""
        query = layer.query_norm(layer.query(inputs).view(len(inputs), self.config.heads, self.config.head_dim))
        return _turned(query, Rotation(rotation.cos[-len(query) :], rotation.sin[-len(query) :]))

    def _key_value(self, layer: DFlashLayer, inputs: Tensor, rotation: Rotation) -> Tensor:
        """Returns keys and values, (rows, 2, kv heads, dim)."""
        shape = (len(inputs), 2, self.config.kv_heads, self.config.head_dim)
        key, value = layer.key_value(inputs).view(shape).unbind(1)
        return torch.stack((_turned(layer.key_norm(key), rotation), value), dim=1)


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    return x * rotation.cos + x.roll(x.shape[-1] // 2, -1) * rotation.sin


def _attend(
    context: DFlashContext,
    start: int,
    index: int,
    kind: DFlashLayerKind,
    of_states: Tensor,
    query: Tensor,
    of_block: Tensor,
) -> Tensor:
    """Attention of one session's block, (block, heads x dim).

    The block's own keys and values, written to the context, are overwritten by the next states.
    """
    key_value = context.write(index, start - len(of_states), torch.cat([of_states, of_block]))
    first = context.begin  # first visible position: where the anchor's window begins
    if kind.window is not None:
        first = max(first, start - kind.window + 1)
    key, value = key_value[:, first - context.begin :].transpose(1, 2)
    mask = _mask(kind, start, len(query), first).to(query.device) if kind.is_causal or kind.window else None
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask, enable_gqa=True
    )
    return attended[0].transpose(0, 1).flatten(1)


def _mask(kind: DFlashLayerKind, start: int, size: int, first: int) -> Tensor:
    """Returns which positions from `first` on each place of the block sees, (block, positions)."""
    ahead = torch.arange(first, start + size) - torch.arange(start, start + size).unsqueeze(1)
    seen = ahead <= 0 if kind.is_causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if kind.window is None else seen & (ahead.abs() < kind.window)
