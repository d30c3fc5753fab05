"""Applies temperature, top-k, top-p and min-p to logits.

`logits_processors` runs before this, and `acceptance` runs after it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.compute.kv_cache import to_device
from protos.messages import Sampling

CANDIDATES = 1024  # maximum tokens examined by top-k and top-p without a full sort


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """Parameters of each position, (positions, 1). `most_k` and the flags cover all positions, and are on the host."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64; positions without top-k keep the whole vocabulary
    top_p: Tensor  # float32
    log_min_p: Tensor  # float32; -inf without min-p
    most_k: int  # largest top-k; 0 without any
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> "Filters":
        """Copies parameters to a device, for one position per sampling. Requires samplings that are not greedy."""
        temperatures = [sampling.temperature for sampling in samplings]
        top_ps = [sampling.top_p for sampling in samplings]
        log_min_ps = [math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf for sampling in samplings]
        top_ks = [sampling.top_k for sampling in samplings]
        floats = to_device([temperatures, top_ps, log_min_ps], device, torch.float32)
        (ks,) = to_device([[k if k > 0 else torch.iinfo(torch.int64).max for k in top_ks]], device)
        temperature, top_p, log_min_p = (column.unsqueeze(1) for column in floats)
        return cls(
            temperature=temperature,
            top_k=ks.unsqueeze(1),
            top_p=top_p,
            log_min_p=log_min_p,
            most_k=max(top_ks),
            has_top_p=any(p < 1 for p in top_ps),
            has_min_p=any(sampling.min_p > 0 for sampling in samplings),
        )


@dataclass(frozen=True, slots=True)
class Restricted:
    """Scaled and masked logits, (positions, vocabulary).

    `is_exact`, (positions,), marks the positions with exact logits. There, `candidates`, (positions, count), contain
    all remaining tokens and possibly others; None: any token may remain.
    """

    logits: Tensor
    is_exact: Tensor
    candidates: Tensor | None


def scaled(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Divides float32 logits, (positions, columns), by temperatures, (positions, 1).

    Shifts the positions' `largest` logits, (positions, 1), to 0 first, and raises temperatures to the least normal
    number, so that no temperature makes the largest logit infinite or NaN.
    """
    return (logits - largest) / temperature.clamp_min(torch.finfo(torch.float32).tiny)


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Scales and masks processed logits in float32, (positions, vocabulary), with the same parameters everywhere.

    Does not scale logits of greedy requests, since only their argmax counts.
    """
    if sampling.greedy:
        return logits
    filters = Filters.of([sampling] * len(logits), logits.device)
    restricted = restrict(logits, filters)
    return restricted.logits if bool(restricted.is_exact.all()) else restrict(logits, filters, exhaustive=True).logits


def restrict(logits: Tensor, filters: Filters, exhaustive: bool = False) -> Restricted:
    """Applies temperature, top-k, top-p and min-p to positions, each with its own parameters.

    Sorting a whole vocabulary takes a large part of a step. Therefore, only the likeliest tokens are examined, and
    `is_exact` marks the positions for which this is exact. With `exhaustive`, the whole vocabulary is sorted if needed.
    """
    is_exact = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    candidates = None
    logits = scaled(logits, logits.max(dim=-1, keepdim=True).values, filters.temperature)
    if filters.most_k:
        logits, enough, candidates = _keep_top_k(logits, filters, exhaustive)
        is_exact &= enough
    if filters.has_top_p:
        logits, enough, candidates = _keep_top_p(logits, filters, exhaustive)
        is_exact &= enough
    if filters.has_min_p:
        if candidates is None or candidates.shape[1] < min(CANDIDATES, logits.shape[1]):
            candidates = logits.topk(min(CANDIDATES, logits.shape[1]), dim=-1).indices
        logits = logits.masked_fill(logits < logits.max(dim=-1, keepdim=True).values + filters.log_min_p, -torch.inf)
    if exhaustive or candidates is None:
        return Restricted(logits, torch.ones_like(is_exact), None)
    is_exact &= logits.isneginf().logical_not().sum(dim=-1) <= candidates.shape[1]
    return Restricted(logits, is_exact, candidates)


def _keep_top_k(logits: Tensor, filters: Filters, exhaustive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Keeps exactly k tokens; ties go to the lower id, so that all devices keep the same tokens.

    Without a full sort, the result is exact only if no logit outside the top k equals the k-th largest.
    """
    vocabulary = logits.shape[-1]
    limits = filters.top_k.clamp_max(vocabulary)
    if exhaustive:
        ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices
        is_kept = torch.arange(vocabulary, device=logits.device) < limits
        mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, is_kept)
        return logits.masked_fill(~mask, -torch.inf), torch.ones_like(limits[:, 0], dtype=torch.bool), ids
    ranked = logits.topk(min(filters.most_k, CANDIDATES, vocabulary), dim=-1)
    count = ranked.values.shape[-1]
    last = ranked.values.gather(-1, limits.clamp_max(count) - 1)
    floor = torch.where(limits < vocabulary, last, -torch.inf)
    mask = logits >= floor
    return logits.masked_fill(~mask, -torch.inf), (mask.sum(dim=-1, keepdim=True) == limits).squeeze(-1), ranked.indices


def _keep_top_p(logits: Tensor, filters: Filters, exhaustive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Keeps the likeliest tokens up to a total probability of top_p, and ties with the last of them; at least one
    token.

    Including ties makes a position's set independent of other positions in the block. So does adding in
    float64 on GPUs, where the order of additions depends on the number of positions. Without a full sort, the result is
    exact only if the candidates reach top_p before the last candidate, which may tie with unexamined tokens.
    """
    total = torch.exp(logits).sum(dim=-1, keepdim=True, dtype=torch.float64)  # the largest logit is 0
    if exhaustive or logits.shape[-1] <= CANDIDATES:
        ranked, ids = torch.sort(logits, dim=-1, descending=True)
    else:
        ranked, ids = logits.topk(CANDIDATES, dim=-1)
    probs = torch.exp(ranked) / total
    count = (probs.cumsum(dim=-1) - probs < filters.top_p).sum(dim=-1, keepdim=True)
    last = ranked.gather(-1, count.clamp_min(1) - 1)  # the count is 0 for non-finite logits
    floor = torch.where(filters.top_p < 1, last, -torch.inf)
    if ids.shape[-1] == logits.shape[-1]:
        enough = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    else:
        is_found = (probs.sum(dim=-1, keepdim=True) > filters.top_p) & (last > ranked[..., -1:])
        enough = (is_found | (filters.top_p >= 1)).squeeze(-1)
    return logits.masked_fill(logits < floor, -torch.inf), enough, ids
