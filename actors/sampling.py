"""From raw logits to the distribution that a request asked for, position by position.

Every position of a block sees the draft tokens before it, as it would in plain decoding. Knows nothing of
acceptance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from protos.messages import Sampling

CANDIDATES = 1024  # tokens that top-k and top-p look at before they sort everything


def process(logits: Tensor, sampling: Sampling, generated: Sequence[int], draft: Sequence[int]) -> Tensor:
    """Scaled and masked logits, float32, shape (positions, vocabulary) like `logits`.

    Row i is the distribution after `generated` and the first i of `draft`. Softmax of a row is the request's
    distribution; excluded tokens are -inf. Greedy requests are not scaled: only their argmax counts.
    """
    logits = logits.to(torch.float32)
    if sampling.penalised:
        logits = _penalise(logits, sampling, generated, draft)
    if sampling.greedy:
        return logits
    # The likeliest token is put at 0 first: no temperature, however small, makes logits infinite.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = _keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = _keep_top_p(logits, sampling.top_p)
    if sampling.min_p > 0:
        floor = logits.max(dim=-1, keepdim=True).values + torch.log(torch.tensor(sampling.min_p))
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _penalise(logits: Tensor, sampling: Sampling, generated: Sequence[int], draft: Sequence[int]) -> Tensor:
    """Frequency and presence penalties as OpenAI defines them, over generated tokens only."""
    counts = torch.zeros_like(logits)  # (positions, vocabulary)
    if generated:
        ids, times = torch.unique(torch.tensor(list(generated)), return_counts=True)
        counts[:, ids.to(logits.device)] = times.to(counts)
    for position, token in enumerate(draft, start=1):
        counts[position:, token] += 1
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def _keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Exactly k tokens stay; of equal logits the lower id, so that every device keeps the same."""
    if k < CANDIDATES:
        floor = logits.topk(k, dim=-1).values[..., -1:]
        if bool(((logits >= floor).sum(dim=-1) == k).all()):  # no tie at the edge: nothing to sort
            return logits.masked_fill(logits < floor, -torch.inf)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    return _keep(logits, order[..., :k])


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens whose probability reaches top_p, and what ties with its last; never empty.

    With the ties, a position's set is the same whichever other positions are in the block: sorting a whole
    vocabulary costs a large part of a step, and is done only when the candidates of some position do not suffice.
    """
    log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
    ranked = logits.topk(min(CANDIDATES, logits.shape[-1]), dim=-1).values
    if not bool(((ranked - log_total).exp().sum(dim=-1) > top_p).all()):
        ranked = torch.sort(logits, dim=-1, descending=True).values
    probs = torch.exp(ranked - log_total)
    count = (probs.cumsum(dim=-1) - probs < top_p).sum(dim=-1, keepdim=True)
    floor = ranked.gather(-1, count.clamp_min(1) - 1)  # a model that computes nonsense counts none
    return logits.masked_fill(logits < floor, -torch.inf)


def _keep(logits: Tensor, ids: Tensor) -> Tensor:
    kept = torch.full_like(logits, -torch.inf)
    return kept.scatter(-1, ids, logits.gather(-1, ids))
