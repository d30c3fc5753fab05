"""Draws the tokens of greedy requests, and of requests that sample from unmodified logits, in one pass over a step, and
accepts the draft tokens that equal them.

These requests differ only in temperature and key, which are tensors here, so any mix of them takes the same few
operations. No shape depends on a value, so a captured step can include them.

Tensor-parallel ranks hold shards of the logits. Noise is a function of key and token, so every rank draws from its own
columns, and the ranks exchange only their best candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from actors.compute.collectives import Shard, SingleRank
from actors.compute.input_row import Integers
from actors.sampling.gumbel import gumbel_maxima
from actors.sampling.maxima import row_maxima
from actors.sampling.truncation import scaled
from protos.draft_tree import MAX_BLOCK_TOKENS

NOT_FINITE = -1  # token of a position with non-finite logits
LOGITS_PER_GROUP = {"cpu": 1 << 18, "cuda": 1 << 24}  # logits per group; limited by CPU cache or GPU memory


DRAW_LISTS = 3  # lists of `Draws.integers`


@dataclass(frozen=True, slots=True)
class Draws:
    """Temperature and key of each sampled position of a step; all other positions take the likeliest token.

    `needs_logits` is False if only drawn and accepted tokens are read; a runner that draws then returns no logits.
    """

    sampled: tuple[int, ...] = ()  # indices among the positions with logits
    keys: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()
    needs_logits: bool = True

    @property
    def integers(self) -> list[Integers]:
        """Returns the fields as integers, temperatures as the bits of a float64."""
        return [
            np.array(self.sampled, np.int64),
            np.array(self.keys, np.int64),
            np.array(self.temperatures, np.float64).view(np.int64),
        ]

    @classmethod
    def of(cls, integers: Sequence[int], needs_logits: bool) -> Self:
        """Restores draws from their concatenated `integers`."""
        sampled, keys, bits = np.array(integers, np.int64).reshape(DRAW_LISTS, -1)
        temperatures = bits.view(np.float64)
        return cls(tuple(sampled.tolist()), tuple(keys.tolist()), tuple(temperatures.tolist()), needs_logits)

    def padded(self, count: int, positions: int) -> list[Integers]:
        """Returns `integers` of `count` draws; those of padding have the index `positions`, which does not exist."""
        lists = np.zeros((DRAW_LISTS, count), np.int64)
        lists[0] = positions
        for part, own in zip(lists, self.integers, strict=True):
            part[: len(own)] = own
        return list(lists)


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


def draw_tokens(logits: Tensor, draws: DrawsOnDevice, shard: Shard | None = None) -> Tensor:
    """Draws a token at every position: (positions, columns) -> (positions,), int64.

    Writes NOT_FINITE where the largest logit is not finite. A maximum propagates NaN, while single -inf logits, written
    by models' masks, are valid. With a `shard`, `logits` are its columns, without those that are never drawn, and
    every rank returns the tokens that would be drawn from whole logits.
    """
    if shard is None:
        shard = Shard(SingleRank(), logits.shape[1])
    if logits.shape[1] == 0:  # the last ranks may have no columns
        logits = logits.new_full((len(logits), 1), -torch.inf)
    largest, tokens = _best(*row_maxima(logits), shard)
    count, columns = logits.shape
    if len(draws.sampled):
        rows_at_once = max(1, LOGITS_PER_GROUP[logits.device.type] // columns)
        bounds = [*range(0, len(draws.sampled), rows_at_once), len(draws.sampled)]
        parts = [_sample(logits, largest, draws, slice(*ends), shard.begin) for ends in pairwise(bounds)]
        scores, at = (torch.cat(part) for part in zip(*parts, strict=True))
        _, drawn = _best(scores, at, shard)
        # The last element takes the draws of padding.
        with_spare = torch.cat([tokens, tokens[:1]]).index_copy_(0, draws.sampled, drawn)
        tokens = with_spare[:count]
    return torch.where(largest.abs() < torch.inf, tokens, NOT_FINITE)


def mark_reached(tokens: Tensor, fed: Tensor, parents: Tensor, longest: int) -> Tensor:
    """Returns a mask of the positions that the target's draws reach, (positions,), bool.

    `tokens` and `fed` are the tokens drawn and fed at the positions; `parents` are indices of the positions before, as
    in `FlatRows.parents`. The first position of a block, its own parent, is always reached. Any other is reached if its
    parent is and drew its token. So in greedy and Gumbel-coupled blocks, the reached draft tokens are accepted. They
    form one path, since siblings have distinct tokens. `acceptance.match` applies the same rule on the host.

    A row has at most `longest` positions. Each round doubles the checked distance to the parents (pointer jumping,
    Wyllie 1979). Marks beyond the longest possible block, as in scored prompts, are undefined.
    """
    if longest <= 1:
        return torch.ones_like(parents, dtype=torch.bool)  # only first positions
    reached = (fed == tokens[parents]) | (parents == torch.arange(len(parents), device=parents.device))
    depth = min(longest - 1, MAX_BLOCK_TOKENS)
    for _ in range(max(0, depth - 1).bit_length()):
        reached = reached & reached[parents]
        parents = parents[parents]
    return reached


def _sample(
    logits: Tensor, largest: Tensor, draws: DrawsOnDevice, part: slice, first_token: int
) -> tuple[Tensor, Tensor]:
    """Returns the best score and its column for a part of the draws."""
    at = draws.sampled[part].clamp_max(len(logits) - 1)
    shift = largest.index_select(0, at).float().unsqueeze(1)
    scores = scaled(logits.index_select(0, at).float(), shift, draws.temperatures[part].float().unsqueeze(1))
    return gumbel_maxima(scores, draws.keys[part], first_token)


def _best(scores: Tensor, columns: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Returns the ranks' best score and its token per position, from every rank's best score and its column.

    As in one maximum over whole rows, NaN is larger than any number, and ties go to the lower token. float64 represents
    scores and tokens exactly.
    """
    if shard.group.size == 1:
        return scores, columns
    pairs = shard.group.all_gather(torch.stack([scores.double(), (columns + shard.begin).double()]))
    best, rank = pairs[:, 0].max(dim=0)  # (ranks, positions) -> (positions,)
    return best, pairs[:, 1].gather(0, rank.unsqueeze(0)).squeeze(0).long()
