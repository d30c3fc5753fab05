"""Log probabilities of tokens under the model's unmodified logits at temperature 1, and near ties of decisions.

An audit compares committed tokens with non-speculative decoding. Where they differ, it asks for the decision's margin:
the smallest error of the logits that would have decided another token.
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

ROWS_AT_ONCE = 64


def score(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenScore]:
    """Scores one token after each row of logits, (rows, vocabulary), with the `top` likeliest alternatives."""
    if not tokens:
        return []
    (ids,) = to_device([tokens], logits.device)
    width = min(max(tops), logits.shape[-1])
    parts = [
        _numbers(some, own, width)
        for some, own in zip(torch.split(logits, ROWS_AT_ONCE), torch.split(ids, ROWS_AT_ONCE), strict=True)
    ]
    rows = torch.cat(parts).tolist()  # the only copy to the host
    return [_score(row, min(top, width), width) for row, top in zip(rows, tops, strict=True)]


def decided_scores(
    blocks: Sequence[PendingBlock], decisions: Sequence[BlockDecision], tops: Sequence[int | None], logits: Tensor
) -> list[tuple[TokenScore, ...]]:
    """Scores the committed tokens of all blocks at once; returns no scores for a block whose `top` is None.

    The blocks' logits are concatenated.
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
    """Returns per token: log probability, rank, ids of alternatives, their log probabilities; (rows, 2 + 2 * width),
    float64.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    own = log_probs.gather(1, ids.unsqueeze(1))
    ranks = (log_probs > own).sum(dim=1, keepdim=True) + 1
    top = log_probs.topk(width, dim=-1)
    return torch.cat([column.double() for column in (own, ranks, top.indices, top.values)], dim=1)


def _score(row: Sequence[float], top: int, width: int) -> TokenScore:
    likeliest = tuple([int(token) for token in row[2 : 2 + top]])
    return TokenScore(row[0], int(row[1]), likeliest, tuple(row[2 + width : 2 + width + top]))


class _Edges(NamedTuple):
    """Error of logits, per token, (vocabulary,), at which top-k, top-p and min-p admit or exclude it."""

    enters: Tensor
    leaves: Tensor

    def within(self, other: "_Edges") -> "_Edges":
        """Combines two filters: tokens must pass both."""
        return _Edges(torch.maximum(self.enters, other.enters), torch.minimum(self.leaves, other.leaves))


def margin(logits: Tensor, sampling: Sampling, chain: ProcessorChain | None, at: DrawAddress, rival: int) -> float:
    """Returns how far `logits`, (vocabulary,), must shift against each other to decide `rival`; 0 if it wins anyway.

    The shift is in logits, at any temperature. With top-k, top-p or min-p the smallest shift is not always found, so
    the result is exact up to a small factor.
    """
    logits = logits.to(torch.float32)
    if chain is not None:
        logits = chain.apply(logits.unsqueeze(0), [()])[0]
    if sampling.greedy:
        return _finite(logits.max() - logits[rival])
    ids = torch.arange(len(logits), device=logits.device)
    scores = logits + sampling.temperature * gumbel(at.key(0, Purpose.DRAW), ids)
    edges = _edges(logits, sampling)
    ahead = torch.minimum(scores - scores[rival], edges.leaves).max()  # every other token must be overtaken or excluded
    return _finite(torch.maximum(ahead, edges.enters[rival]))


def _finite(error: Tensor) -> float:
    """Converts to a float of at least 0; NaN and infinity, from non-finite logits, become the float32 maximum."""
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
    """Returns the edges of a filter that keeps logits from `last` up; `first_out` is the largest excluded one."""
    return _Edges((last - logits).clamp_min(0), (logits - first_out).clamp_min(0))


def _top_p_edges(logits: Tensor, filtered: Tensor, sampling: Sampling) -> _Edges:
    """Returns top-p's edges: a token overtakes its neighbors, or the likelier tokens' probability crosses top_p."""
    temperature = sampling.temperature
    ranked, ids = filtered.sort(descending=True)
    probs = torch.softmax((ranked - ranked[0]) / temperature, dim=-1)
    before = torch.empty_like(probs).scatter(0, ids, probs.cumsum(0) - probs)  # probability of all likelier tokens
    last = torch.where(before < sampling.top_p, filtered, torch.inf).min()
    first_out = torch.where(filtered < last, filtered, -torch.inf).max()
    steps = _around(logits, last, first_out)
    shift = temperature * torch.log(before / sampling.top_p)  # approximate logit error that moves `before` to top_p
    return _Edges(torch.minimum(steps.enters, shift.clamp_min(0)), torch.minimum(steps.leaves, (-shift).clamp_min(0)))
