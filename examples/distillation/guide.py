"""Supervises attention heads, so that a small draft learns to copy.

Some heads of an early layer learn to attend to the previous token and the token before it. Heads of a later layer can
then match earlier occurrences of the last two tokens, and attend to the token after them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Guide:
    """`AttentionObserver` that collects the heads' attention losses."""

    def __init__(self, tokens: Tensor, layers: tuple[int, int], heads: int) -> None:
        self._fetching_layer, self._copying_layer = layers
        self._heads = heads
        self._followers = followers(tokens)
        self.losses: list[Tensor] = []

    def __call__(self, layer: int, scores: Tensor) -> None:
        half = self._heads // 2
        if layer == self._fetching_layer:
            fetched = missed_offset(scores[:, :half], 1), missed_offset(scores[:, half : self._heads], 2)
            self.losses.append((fetched[0] + fetched[1]) / 2)
        if layer == self._copying_layer:
            self.losses.append(missed(scores[:, : self._heads], self._followers))

    def loss(self) -> Tensor:
        return torch.stack(self.losses).sum()


def followers(tokens: Tensor) -> Tensor:
    """Returns a mask [B, t, s]: True if s <= t and the two tokens before s equal the two tokens that end at t."""
    same = tokens[:, :, None] == tokens[:, None, :]
    pair = same.clone()
    pair[:, 1:, 1:] &= same[:, :-1, :-1]
    found = torch.zeros_like(pair)
    found[:, :, 1:] = pair[:, :, :-1]
    found[:, :, :2] = False
    return found & torch.ones_like(found[0]).tril()


def missed(scores: Tensor, wanted: Tensor) -> Tensor:
    """Returns the mean negative log of the attention to `wanted` places, over rows that have any."""
    asked = wanted.any(dim=2)
    logs = scores.transpose(1, 2)[asked].float().log_softmax(dim=-1)  # [n, H, T]
    return -logs.masked_fill(~wanted[asked][:, None], -torch.inf).logsumexp(dim=-1).mean()


def missed_offset(scores: Tensor, offset: int) -> Tensor:
    """Returns the mean negative log of the attention to the token `offset` places earlier."""
    return -scores[:, :, offset:].float().log_softmax(dim=-1).diagonal(dim1=2, dim2=3).mean()
