"""Applies temperature, top-k, top-p and min-p to logits.

`logits_processors` runs before this, and `acceptance` runs after it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from protos.messages import Sampling

CANDIDATES = 1024  # maximum tokens examined by top-k and top-p without a full sort


@dataclass(frozen=True, slots=True)
class Restricted:
    """Scaled and masked logits, (positions, vocabulary).

    `is_exact`, (positions,), marks the positions with exact logits. There, `candidates`, (positions, count), contain
    all remaining tokens and possibly others; None: any token may remain.
    """

    logits: Tensor
    is_exact: Tensor
    candidates: Tensor | None


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Scales and masks processed logits in float32, (positions, vocabulary).

    Does not scale logits of greedy requests, since only their argmax counts.
    """
    if sampling.greedy:
        return logits
    restricted = restrict(logits, sampling)
    return restricted.logits if bool(restricted.is_exact.all()) else restrict(logits, sampling, exhaustive=True).logits


def restrict(logits: Tensor, sampling: Sampling, exhaustive: bool = False) -> Restricted:
    """Applies temperature, top-k, top-p and min-p to positions with equal parameters.

    Sorting a whole vocabulary takes a large part of a step. Therefore, only the likeliest tokens are examined, and
    `is_exact` marks the positions for which this is exact. With `exhaustive`, the whole vocabulary is sorted if needed.
    """
    is_exact = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    candidates = None
    # Shift the largest logit to 0 first, so that no temperature makes logits infinite.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, enough, candidates = _keep_top_k(logits, sampling.top_k, exhaustive)
        is_exact &= enough
    if sampling.top_p < 1:
        logits, enough, candidates = _keep_top_p(logits, sampling.top_p, exhaustive)
        is_exact &= enough
    if sampling.min_p > 0:
        floor = logits.max(dim=-1, keepdim=True).values + torch.log(torch.tensor(sampling.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
        if candidates is None:
            candidates = logits.topk(min(CANDIDATES, logits.shape[-1]), dim=-1).indices
            is_exact &= logits.isneginf().logical_not().sum(dim=-1) <= CANDIDATES
    if exhaustive:
        return Restricted(logits, torch.ones_like(is_exact), None)
    return Restricted(logits, is_exact, candidates)


def _keep_top_k(logits: Tensor, k: int, exhaustive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Keeps exactly k tokens; ties go to the lower id, so that all devices keep the same tokens.

    Without a full sort, the result is exact only if no logit outside the top k equals the k-th largest.
    """
    if k < CANDIDATES and not exhaustive:
        ranked = logits.topk(k, dim=-1)
        floor = ranked.values[..., -1:]
        mask = logits >= floor
        return logits.masked_fill(~mask, -torch.inf), mask.sum(dim=-1) == k, ranked.indices
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[..., :k]
    return _keep(logits, ids), torch.ones(len(logits), dtype=torch.bool, device=logits.device), ids


def _keep_top_p(logits: Tensor, top_p: float, exhaustive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Keeps the likeliest tokens up to a total probability of top_p, and ties with the last of them; at least one
    token.

    Including ties makes a position's set independent of other positions in the block. Without a full sort, the result
    is exact only if the candidates reach top_p before the last candidate, which may tie with unexamined tokens.
    """
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
    if exhaustive or logits.shape[-1] <= CANDIDATES:
        ranked, ids = torch.sort(logits, dim=-1, descending=True)
    else:
        ranked, ids = logits.topk(CANDIDATES, dim=-1)
    probs = torch.exp(ranked - log_total)
    count = (probs.cumsum(dim=-1) - probs < top_p).sum(dim=-1, keepdim=True)
    floor = ranked.gather(-1, count.clamp_min(1) - 1)  # the count is 0 for non-finite logits
    enough = (probs.sum(dim=-1) > top_p) & (floor > ranked[..., -1:]).squeeze(-1)
    if ids.shape[-1] == logits.shape[-1]:
        enough = torch.ones_like(enough)
    return logits.masked_fill(logits < floor, -torch.inf), enough, ids


def _keep(logits: Tensor, ids: Tensor) -> Tensor:
    filtered_logits = torch.full_like(logits, -torch.inf)
    return filtered_logits.scatter(-1, ids, logits.gather(-1, ids))
