"""Log probabilities of tokens, from unmodified logits at temperature 1, and margins of decisions.

An audit compares committed tokens with non-speculative decoding. If they differ, it requests the margin of the
decision: the smallest error of the logits that would have changed the token.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from actors.compute.kv_cache import to_device
from actors.sampling.acceptance import BlockDecision, DrawAddress, PendingBlock
from actors.sampling.gumbel import Purpose, gumbel
from actors.sampling.logits_processors import ProcessorChain
from protos.messages import Sampling, TokenScore

ROWS_PER_GROUP = 64


def score(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenScore]:
    """Scores one token per row of logits, (rows, vocabulary), with `top` likeliest alternatives."""
    if not tokens:
        return []
    (ids,) = to_device([tokens], logits.device)
    width = min(max(tops), logits.shape[-1])
    parts = [
        _numbers(some, own, width)
        for some, own in zip(torch.split(logits, ROWS_PER_GROUP), torch.split(ids, ROWS_PER_GROUP), strict=True)
    ]
    rows = torch.cat(parts).tolist()  # the only copy to the host
    return [_score(row, min(top, width), width) for row, top in zip(rows, tops, strict=True)]


def decided_scores(
    blocks: Sequence[PendingBlock], decisions: Sequence[BlockDecision], tops: Sequence[int | None], logits: Tensor
) -> list[tuple[TokenScore, ...]]:
    """Scores the committed tokens of all blocks together; `top` is None for blocks without scores.

    `logits` concatenates the logits of the blocks.
    """
    rows_at: list[int] = []
    tokens: list[int] = []
    widths: list[int] = []
    counts: list[int] = []
    at = 0
    for block, decision, top in zip(blocks, decisions, tops, strict=True):
        counts.append(0 if top is None else len(decision.path) + 1)
        if top is not None:
            rows_at += [at, *[at + 1 + node for node in decision.path]]
            tokens += [*[block.draft.tokens[node] for node in decision.path], decision.next_token]
            widths += [top] * counts[-1]
        at += block.positions
    token_scores = iter(score(logits[to_device([rows_at], logits.device)[0]], tokens, widths) if tokens else ())
    return [tuple(islice(token_scores, count)) for count in counts]


def _numbers(logits: Tensor, ids: Tensor, width: int) -> Tensor:
    """Returns log probability, rank, alternative ids and their log probabilities: (rows, 2 + 2 * width), float64."""
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    own = log_probs.gather(1, ids.unsqueeze(1))
    ranks = (log_probs > own).sum(dim=1, keepdim=True) + 1
    top = log_probs.topk(width, dim=-1)
    return torch.cat([column.double() for column in (own, ranks, top.indices, top.values)], dim=1)


def _score(row: Sequence[float], top: int, width: int) -> TokenScore:
    likeliest = tuple([int(token) for token in row[2 : 2 + top]])
    return TokenScore(row[0], int(row[1]), likeliest, tuple(row[2 + width : 2 + width + top]))


class _Edges(NamedTuple):
    """Logit error, (vocabulary,), at which the filters top-k, top-p and min-p admit or exclude each token."""

    enters: Tensor
    leaves: Tensor

    def within(self, other: "_Edges") -> "_Edges":
        """Intersects two filters: a token must pass both."""
        return _Edges(torch.maximum(self.enters, other.enters), torch.minimum(self.leaves, other.leaves))


def margin(logits: Tensor, sampling: Sampling, chain: ProcessorChain | None, at: DrawAddress, rival: int) -> float:
    """Returns the smallest relative shift of `logits`, (vocabulary,), that decides `rival`; 0 if `rival` wins anyway.

    The shift is measured in logits at any temperature. With top-k, top-p or min-p, the result may exceed the smallest
    shift by a small factor.
    """
    logits = logits.to(torch.float32)
    if chain is not None:
        logits = chain.apply(logits.unsqueeze(0), [()])[0]
    if sampling.greedy:
        return _finite(logits.max() - logits[rival])
    ids = torch.arange(len(logits), device=logits.device)
    scores = logits + sampling.temperature * gumbel(at.key(0, Purpose.DRAW), ids)
    edges = _edges(logits, sampling)
    ahead = torch.minimum(scores - scores[rival], edges.leaves).max()  # each other token must be overtaken or excluded
    return _finite(torch.maximum(ahead, edges.enters[rival]))


def _finite(error: Tensor) -> float:
    """Converts to a non-negative float; NaN and infinity, from non-finite logits, become the float32 maximum."""
    return max(0.0, float(torch.nan_to_num(error, nan=torch.finfo(torch.float32).max)))


def _edges(logits: Tensor, sampling: Sampling) -> _Edges:
    edges = _Edges(torch.zeros_like(logits), torch.full_like(logits, torch.inf))
    filtered = logits
    if 0 < sampling.top_k < len(logits):
        last, first_out = logits.topk(sampling.top_k + 1).values[-2:]
        edges = edges.within(_around(logits, last, first_out))
        filtered = logits.masked_fill(logits < last, -torch.inf)
    if sampling.top_p < 1:
        edges = edges.within(_top_p_edges(logits, filtered, sampling))
    if sampling.min_p > 0:
        floor = logits.max() + sampling.temperature * torch.log(torch.tensor(sampling.min_p, device=logits.device))
        edges = edges.within(_around(logits, floor, floor))
    return edges


def _around(logits: Tensor, last: Tensor, first_out: Tensor) -> _Edges:
    """Returns the edges of a filter that keeps logits >= `last`; `first_out` is the largest excluded logit."""
    return _Edges((last - logits).clamp_min(0), (logits - first_out).clamp_min(0))


def _top_p_edges(logits: Tensor, filtered: Tensor, sampling: Sampling) -> _Edges:
    """Returns the edges of top-p: a token overtakes its neighbors, or the probability before it crosses top_p."""
    temperature = sampling.temperature
    ranked, ids = filtered.sort(descending=True)
    probs = torch.softmax((ranked - ranked[0]) / temperature, dim=-1)
    before = torch.empty_like(probs).scatter(0, ids, probs.cumsum(0) - probs)  # total probability of likelier tokens
    last = torch.where(before < sampling.top_p, filtered, torch.inf).min()
    first_out = torch.where(filtered < last, filtered, -torch.inf).max()
    steps = _around(logits, last, first_out)
    shift = temperature * torch.log(before / sampling.top_p)  # approximate logit error at which `before` equals top_p
    return _Edges(torch.minimum(steps.enters, shift.clamp_min(0)), torch.minimum(steps.leaves, (-shift).clamp_min(0)))
