"""Draws the tokens of greedy requests, and of requests that sample from unmodified logits, in one pass over a step.

These requests differ only in temperature and key, which are tensors here, so any mix of them takes the same few
operations. No shape depends on a value, so a captured step can include the draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from actors.sampling.gumbel import gumbel_argmaxes
from actors.sampling.truncation import scaled

NOT_FINITE = -1  # token of a position with non-finite logits
LOGITS_PER_GROUP = {"cpu": 1 << 18, "cuda": 1 << 24}  # logits per group; limited by CPU cache or GPU memory


DRAW_LISTS = 3  # fields of `Draws`


@dataclass(frozen=True, slots=True)
class Draws:
    """Temperature and key of each sampled position of a step; all other positions take the likeliest token."""

    sampled: tuple[int, ...] = ()  # indices among the positions with logits
    keys: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()

    @property
    def integers(self) -> list[Sequence[int]]:
        """Returns the fields as integers, temperatures as the bits of a float64."""
        return [self.sampled, self.keys, np.array(self.temperatures, np.float64).view(np.int64).tolist()]

    def padded(self, count: int, positions: int) -> list[Sequence[int]]:
        """Returns `integers` of `count` draws; those of padding have the index `positions`, which does not exist."""
        missing = count - len(self.sampled)
        fills = (positions, 0, 0)
        return [[*part, *[fill] * missing] for part, fill in zip(self.integers, fills, strict=True)]


NO_DRAWS = Draws()


@dataclass(frozen=True, slots=True, eq=False)
class DrawsOnDevice:
    """`Draws` as tensors, each (sampled,). An index beyond the last position is padding."""

    sampled: Tensor
    keys: Tensor
    temperatures: Tensor  # float64

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Self:
        """Builds them from `Draws.integers`, copied to a device."""
        sampled, keys, temperatures = parts
        return cls(sampled, keys, temperatures.view(torch.float64))


def draw_tokens(logits: Tensor, draws: DrawsOnDevice) -> Tensor:
    """Draws a token at every position: (positions, vocabulary) -> (positions,), int64.

    Writes NOT_FINITE where the largest logit is not finite. A maximum propagates NaN, while single -inf logits, written
    by models' masks, are valid.
    """
    largest, tokens = logits.max(dim=-1)  # in bfloat16, argmax takes four times as long
    count, vocabulary = logits.shape
    if len(draws.sampled):
        rows_at_once = max(1, LOGITS_PER_GROUP[logits.device.type] // vocabulary)
        bounds = [*range(0, len(draws.sampled), rows_at_once), len(draws.sampled)]
        drawn = [_sample(logits, draws, begin, end) for begin, end in pairwise(bounds)]
        # The last element takes the draws of padding.
        with_spare = torch.cat([tokens, tokens[:1]]).index_copy_(0, draws.sampled, torch.cat(drawn))
        tokens = with_spare[:count]
    return torch.where(torch.isfinite(largest), tokens, NOT_FINITE)


def _sample(logits: Tensor, draws: DrawsOnDevice, begin: int, end: int) -> Tensor:
    at = draws.sampled[begin:end].clamp_max(len(logits) - 1)
    scores = scaled(logits.index_select(0, at).float(), draws.temperatures[begin:end].float().unsqueeze(1))
    return gumbel_argmaxes(scores, draws.keys[begin:end])
