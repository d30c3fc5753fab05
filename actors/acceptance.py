"""Which draft tokens stand, and which token follows: the verdict's arithmetic.

Two exact rules; greedy is the special case of both.

coupled: the target draws every position itself, as argmax(logits + Gumbel noise), with noise that the drafter
    used too. A draft token stands where it equals the target's own draw. The output is a function of prefix,
    parameters and seed alone (Daliri et al. 2024, arXiv 2408.07978).
ratio: a draft token x stands with probability min(1, target_probs[x] / draft_probs[x]); after a rejection the
    recovered token is drawn from normalised max(target_probs - draft_probs, 0) (Leviathan et al. 2023,
    arXiv 2211.17192). Without draft_probs a draft token is a point mass.

Knows nothing of sessions' ends: what follows a stop id is cut elsewhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.noise import Purpose, gumbel, key, uniform_scalar
from protos.messages import Acceptance, SparseProbs


@dataclass(frozen=True, slots=True)
class DrawAddress:
    """Where a session's noise lives; `position` is that of the first token to decide."""

    seed: int
    choice: int
    position: int

    def key(self, offset: int, purpose: Purpose) -> int:
        return key(self.seed, self.choice, self.position + offset, purpose)


@dataclass(frozen=True, slots=True)
class Decision:
    """`accepted` draft tokens stand; `next_token` is the recovered or bonus token."""

    accepted: int
    next_token: int


def accept(
    rule: Acceptance,
    greedy: bool,
    logits: Tensor,
    draft: tuple[int, ...],
    draft_probs: SparseProbs | None,
    at: DrawAddress,
) -> Decision:
    """Decides one block; `logits` are processed, shape (len(draft) + 1, vocabulary)."""
    if greedy:
        return _match(logits.argmax(dim=-1).tolist(), draft)
    if rule is Acceptance.COUPLED:
        return _match(draw(logits, at), draft)
    return _accept_by_ratio(logits, draft, draft_probs, at)


def draw(logits: Tensor, at: DrawAddress) -> list[int]:
    """The target's own token at each position, shape (positions, vocabulary) -> positions."""
    keys = [at.key(offset, Purpose.DRAW) for offset in range(logits.shape[0])]
    noise = gumbel(keys, logits.shape[-1], logits.device)
    tokens: list[int] = (logits + noise).argmax(dim=-1).tolist()
    return tokens


def _match(own: list[int], draft: tuple[int, ...]) -> Decision:
    """The target's own tokens decide: the draft stands as far as it equals them."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == own[accepted]:
        accepted += 1
    return Decision(accepted, own[accepted])


def _accept_by_ratio(
    logits: Tensor, draft: tuple[int, ...], draft_probs: SparseProbs | None, at: DrawAddress
) -> Decision:
    target_probs = torch.softmax(logits.to(torch.float64), dim=-1)
    for offset, token in enumerate(draft):
        draft_row = _dense(draft_probs, offset, token, target_probs[offset])
        u = uniform_scalar(at.key(offset, Purpose.ACCEPT))
        if u * float(draft_row[token]) < float(target_probs[offset, token]):
            continue
        residual = (target_probs[offset] - draft_row).clamp_min(0)
        if float(residual.sum()) <= 0:  # equal up to rounding: a rejection has then no mass of its own
            residual = target_probs[offset]
        return Decision(offset, _draw_from(residual, at.key(offset, Purpose.RECOVER)))
    return Decision(len(draft), _draw_from(target_probs[len(draft)], at.key(len(draft), Purpose.DRAW)))


def _dense(draft_probs: SparseProbs | None, offset: int, token: int, like: Tensor) -> Tensor:
    """One position's draft probabilities over the whole vocabulary."""
    row = torch.zeros_like(like)
    if draft_probs is None:
        row[token] = 1
        return row
    weights = torch.tensor(draft_probs.weights[offset], dtype=like.dtype, device=like.device)
    ids = torch.tensor(draft_probs.token_ids[offset], device=like.device)
    return row.index_add(0, ids, weights / weights.sum())


def _draw_from(probs: Tensor, at: int) -> int:
    """One token from unnormalised probabilities, shape (vocabulary,), by the Gumbel maximum."""
    return int((probs.log() + gumbel([at], probs.shape[-1], probs.device)[0]).argmax())
