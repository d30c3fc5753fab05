"""Log probabilities of tokens by the model's own logits, at temperature 1 and with nothing done to them."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from actors.compute.h2d_copy import to_device
from actors.sampling.reference import BlockDecision
from actors.sampling.rejection_sampler import PendingBlock
from protos.scores import TokenScore

ROWS_AT_ONCE = 64


def score(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenScore]:
    """Of one token after each row of logits, (rows, vocabulary), with so many of the likeliest beside it."""
    if not tokens:
        return []
    (ids,) = to_device([tokens], logits.device)
    width = min(max(tops), logits.shape[-1])
    parts = [
        _numbers(some, own, width)
        for some, own in zip(torch.split(logits, ROWS_AT_ONCE), torch.split(ids, ROWS_AT_ONCE), strict=True)
    ]
    rows = torch.cat(parts).tolist()  # the one copy to the host
    return [_score(row, min(top, width), width) for row, top in zip(rows, tops, strict=True)]


def decided_scores(
    blocks: Sequence[PendingBlock], decisions: Sequence[BlockDecision], tops: Sequence[int | None], logits: Tensor
) -> list[tuple[TokenScore, ...]]:
    """Of what was decided of each block, all at once; nothing of a block whose `top` is None.

    The blocks' logits follow one another.
    """
    places: list[int] = []
    tokens: list[int] = []
    widths: list[int] = []
    counts: list[int] = []
    at = 0
    for block, decision, top in zip(blocks, decisions, tops, strict=True):
        counts.append(0 if top is None else len(decision.path) + 1)
        if top is not None:
            places += [at, *[at + 1 + node for node in decision.path]]
            tokens += [*[block.draft.tokens[node] for node in decision.path], decision.next_token]
            widths += [top] * counts[-1]
        at += block.positions
    found = iter(score(logits[to_device([places], logits.device)[0]], tokens, widths) if tokens else ())
    return [tuple(islice(found, count)) for count in counts]


def _numbers(logits: Tensor, ids: Tensor, width: int) -> Tensor:
    """Own logarithm and rank, then tokens, then their logarithms: float64, (rows, 2 + 2 * width)."""
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    own = log_probs.gather(1, ids.unsqueeze(1))
    ranks = (log_probs > own).sum(dim=1, keepdim=True) + 1
    top = log_probs.topk(width, dim=-1)
    return torch.cat([column.double() for column in (own, ranks, top.indices, top.values)], dim=1)


def _score(row: Sequence[float], top: int, width: int) -> TokenScore:
    likeliest = tuple([int(token) for token in row[2 : 2 + top]])
    return TokenScore(row[0], int(row[1]), likeliest, tuple(row[2 + width : 2 + width + top]))
