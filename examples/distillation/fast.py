"""Speeds up training on a CPU: attention as batched matrix products, and sparse updates of the embedding.

For short sequences, the backward pass of PyTorch's fused attention takes several times as long as that of two batched
products. A step uses a few thousand rows of the vocabulary; dense gradients and optimizer states would cost mostly
memory traffic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "matrix_products"
AttentionObserver = Callable[[int, Tensor], None]  # called with a layer index and its attention scores [B, H, T, T]


def _causal_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    observe: AttentionObserver | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes causal attention. query [B, H, T, D]; key, value [B, KV, T, D]; trailing padding needs no mask."""
    batch, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    key = key.repeat_interleave(groups, 1).flatten(0, 1)
    value = value.repeat_interleave(groups, 1).flatten(0, 1)
    later = torch.full((length, length), -torch.inf, dtype=torch.bfloat16).triu(1)
    scores = torch.bmm((query * scaling).flatten(0, 1), key.transpose(1, 2)) + later
    if observe is not None:
        observe(int(module.layer_idx), scores.view(batch, heads, length, length))
    weights = torch.softmax(scores.to(torch.bfloat16), dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.bmm(weights, value).view(batch, heads, length, dim).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _causal_attention)


class VocabularyRows:
    """AdamW on the rows of a tied embedding that a step uses; other rows and their moments stay unchanged."""

    def __init__(self, weight: torch.nn.Parameter, betas: tuple[float, float]) -> None:
        self._weight = weight.requires_grad_(False)
        self._betas = betas
        self._first = torch.zeros_like(weight)
        self._second = torch.zeros_like(weight)
        self._steps = torch.zeros(len(weight))
        self._ids = torch.empty(0, dtype=torch.long)
        self.selected = torch.empty(0)  # this step's rows, which receive gradients

    @property
    def size(self) -> int:
        return len(self._weight)

    def select(self, tokens: Tensor, vocabulary: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the embeddings of `tokens`, and the LM-head rows of `vocabulary`."""
        self._ids, places = torch.cat((vocabulary, tokens.flatten())).unique(return_inverse=True)
        self.selected = self._weight[self._ids].requires_grad_(True)
        head = self.selected[places[: len(vocabulary)]]
        return F.embedding(places[len(vocabulary) :].view_as(tokens), self.selected), head

    @torch.no_grad()
    def step(self, rate: float, epsilon: float = 1e-8) -> None:
        gradient = self.selected.grad
        ids = self._ids
        (decay, decay_squares) = self._betas
        assert gradient is not None
        steps = self._steps[ids] + 1
        first = self._first[ids].lerp_(gradient, 1 - decay)
        second = self._second[ids].mul_(decay_squares).addcmul_(gradient, gradient, value=1 - decay_squares)
        self._steps[ids] = steps
        self._first[ids] = first
        self._second[ids] = second
        corrected = (second / (1 - decay_squares**steps)[:, None]).sqrt_().add_(epsilon)
        self._weight[ids] = self.selected - rate * first / (1 - decay**steps)[:, None] / corrected
