"""Draws tokens from logits that are split over tensor-parallel ranks, without gathering the logits.

Each rank finds the best token of its own part of the vocabulary, and the ranks gather only pairs of score and token: 16
bytes per position and rank. This suffices for positions without logits processors, filters, scores and audits. The
tokens equal those that `acceptance` draws from whole logits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from actors.compute.collectives import Group
from actors.sampling.draws import NOT_FINITE
from actors.sampling.gumbel import NOISE_PER_GROUP, gumbels


class LogitShard(NamedTuple):
    """One rank's logits of a step; the ranks hold ascending parts of the vocabulary."""

    logits: Tensor  # (positions, columns)
    begin: int  # token of the first column
    group: Group

    def within(self, vocabulary: int) -> "LogitShard":
        """Returns the part with tokens below `vocabulary`; it may have no columns."""
        return self._replace(logits=self.logits[:, : max(0, vocabulary - self.begin)])


class Best(NamedTuple):
    """Largest score per position, with its token; NaN is larger than any number, and ties go to the lower token."""

    scores: Tensor  # (positions,), float64, which represents every score exactly
    tokens: Tensor  # (positions,), int64


def best_of_shard(scores: Tensor, begin: int) -> Best:
    """Returns the best tokens of one rank, whose `scores`, (positions, columns), start at token `begin`."""
    if scores.shape[1] == 0:  # of a last rank, if there are few tokens
        lowest = torch.full((len(scores),), -torch.inf, dtype=torch.float64, device=scores.device)
        return Best(lowest, torch.full_like(lowest, begin, dtype=torch.int64))
    values, indices = scores.max(dim=-1)
    return Best(values.to(torch.float64), indices + begin)


def best_of_group(own: Best, group: Group) -> Best:
    """Gathers the ranks' pairs; returns the best of all, equal on all ranks."""
    pairs = group.all_gather(torch.stack([own.scores, own.tokens.to(torch.float64)]))  # (ranks, 2, positions)
    scores, rank = pairs[:, 0].max(dim=0)
    return Best(scores, pairs[:, 1].gather(0, rank.unsqueeze(0)).squeeze(0).to(torch.int64))


def greedy_tokens(shard: LogitShard) -> Tensor:
    """Returns the tokens with the largest logits, (positions,); NOT_FINITE where the largest logit is not finite."""
    largest = best_of_group(best_of_shard(shard.logits, shard.begin), shard.group)
    return torch.where(torch.isfinite(largest.scores), largest.tokens, NOT_FINITE)


def coupled_tokens(shard: LogitShard, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Draws tokens by Gumbel coupling, (positions,); NOT_FINITE where the largest logit is not finite.

    `temperatures`, float32, and `keys`, int64, are (positions,). A temperature of 0 selects the largest logit.
    """
    largest = best_of_group(best_of_shard(shard.logits, shard.begin), shard.group)
    # As in `truncation.restrict`. Greedy positions are divided by 1, and their draws are not used.
    shift = largest.scores.to(torch.float32).unsqueeze(1)
    is_greedy = temperatures == 0
    scale = torch.where(is_greedy, 1.0, temperatures).unsqueeze(1)
    drawn = best_of_group(_best_draw(shard.logits, shift, scale, keys.unsqueeze(1), shard.begin), shard.group)
    tokens = torch.where(is_greedy, largest.tokens, drawn.tokens)
    return torch.where(torch.isfinite(largest.scores), tokens, NOT_FINITE)


def _best_draw(logits: Tensor, shift: Tensor, scale: Tensor, keys: Tensor, begin: int) -> Best:
    """Returns the best of scaled logits plus noise, in slices of positions."""
    ids = torch.arange(begin, begin + logits.shape[1], device=logits.device)
    at_once = max(1, NOISE_PER_GROUP[logits.device.type] // max(1, len(ids)))
    slices = zip(*[torch.split(each, at_once) for each in (logits, shift, scale, keys)], strict=True)
    parts = [
        best_of_shard((part.to(torch.float32) - top) / by + gumbels(key, ids), begin) for part, top, by, key in slices
    ]
    return Best(torch.cat([part.scores for part in parts]), torch.cat([part.tokens for part in parts]))
