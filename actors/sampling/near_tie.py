"""How near a decision was: by how much logits must be wrong for another token to have been decided.

An audit asks for it, of one token at a time, where plain decoding says another token than was committed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from actors.sampling.gumbel import Purpose, gumbel
from actors.sampling.logits.processor import ProcessorChain
from actors.sampling.reference import DrawAddress
from protos.messages import Sampling


class _Edges(NamedTuple):
    """How far each token is from being let in by top-k, top-p and min-p, and from being left out, (vocabulary,)."""

    enters: Tensor
    leaves: Tensor

    def within(self, other: "_Edges") -> "_Edges":
        """Both restrictions together."""
        return _Edges(torch.maximum(self.enters, other.enters), torch.minimum(self.leaves, other.leaves))


def margin(logits: Tensor, sampling: Sampling, chain: ProcessorChain | None, at: DrawAddress, rival: int) -> float:
    """The least error of logits against each other, (vocabulary,), by which `rival` is decided; 0 if it is anyway.

    The error is in logits, whatever the temperature. Among restricted tokens it may take another way than the nearest,
    so there it is right up to a small factor.
    """
    logits = logits.to(torch.float32)
    if chain is not None:
        logits = chain.apply(logits.unsqueeze(0), [()])[0]
    if sampling.greedy:
        return _finite(logits.max() - logits[rival])
    ids = torch.arange(len(logits), device=logits.device)
    scores = logits + sampling.temperature * gumbel(at.key(0, Purpose.DRAW), ids)
    edges = _edges(logits, sampling)
    ahead = torch.minimum(scores - scores[rival], edges.leaves).max()  # each other token is overtaken, or left out
    return _finite(torch.maximum(ahead, edges.enters[rival]))


def _finite(error: Tensor) -> float:
    """Of a model that computes nonsense too."""
    return max(0.0, float(torch.nan_to_num(error, nan=torch.finfo(torch.float32).max)))


def _edges(logits: Tensor, sampling: Sampling) -> _Edges:
    edges = _Edges(torch.zeros_like(logits), torch.full_like(logits, torch.inf))
    kept = logits
    if 0 < sampling.top_k < len(logits):
        last, first_out = logits.topk(sampling.top_k + 1).values[-2:]
        edges = edges.within(_around(logits, last, first_out))
        kept = logits.masked_fill(logits < last, -torch.inf)
    if sampling.top_p < 1:
        edges = edges.within(_top_p_edges(logits, kept, sampling))
    if sampling.min_p > 0:
        floor = logits.max() + sampling.temperature * torch.log(torch.tensor(sampling.min_p, device=logits.device))
        edges = edges.within(_around(logits, floor, floor))
    return edges


def _around(logits: Tensor, last: Tensor, first_out: Tensor) -> _Edges:
    """Of a restriction that keeps what is at least `last`; `first_out` is the next below."""
    return _Edges((last - logits).clamp_min(0), (logits - first_out).clamp_min(0))


def _top_p_edges(logits: Tensor, kept: Tensor, sampling: Sampling) -> _Edges:
    """A token crosses the edge past its neighbours, or as the probability of all likelier ones crosses top_p."""
    temperature = sampling.temperature
    ranked, ids = kept.sort(descending=True)
    probs = torch.softmax((ranked - ranked[0]) / temperature, dim=-1)
    before = torch.empty_like(probs).scatter(0, ids, probs.cumsum(0) - probs)  # the probability of likelier tokens
    last = torch.where(before < sampling.top_p, kept, torch.inf).min()
    first_out = torch.where(kept < last, kept, -torch.inf).max()
    steps = _around(logits, last, first_out)
    shift = temperature * torch.log(before / sampling.top_p)  # of all likelier tokens
    return _Edges(torch.minimum(steps.enters, shift.clamp_min(0)), torch.minimum(steps.leaves, (-shift).clamp_min(0)))
