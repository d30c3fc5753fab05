"""Which draft tokens stand, and which token follows: the verdict's arithmetic.

Two exact rules; greedy is the special case of both.

coupled: the target draws every position itself, as argmax(logits + Gumbel noise), with noise that the drafter
    used too. A draft token stands where it equals the target's own draw. The output is a function of prefix,
    parameters and seed alone (Daliri et al. 2024, arXiv 2408.07978).
ratio: a draft token x stands with probability min(1, target_probs[x] / draft_probs[x]); after a rejection the
    recovered token is drawn from normalised max(target_probs - draft_probs, 0) (Leviathan et al. 2023,
    arXiv 2211.17192). Without draft_probs a draft token is a point mass.

This is the specification, one block at a time; a step decides all of its blocks together (`decisions.py`). Knows
nothing of sessions' ends: what follows a stop id is cut elsewhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.sampling.noise import Purpose, gumbel_argmax, key, uniform_scalar
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
class BlockDecision:
    """`accepted` draft tokens stand; `next_token` is the recovered or bonus token.

    With `alternative`, the accepted token is this one, in the place of the first that was drafted.
    """

    accepted: int
    next_token: int
    alternative: int | None = None


def accept(
    rule: Acceptance,
    greedy: bool,
    logits: Tensor,
    draft: tuple[int, ...],
    draft_probs: SparseProbs | None,
    at: DrawAddress,
    alternatives: tuple[int, ...] = (),
) -> BlockDecision:
    """Decides one block; `logits` are processed, shape (len(draft) + 1 + len(alternatives), vocabulary).

    Those after an alternative to the first draft token come last. There are none under ratio.
    """
    if greedy:
        return match(logits.argmax(dim=-1).tolist(), draft, alternatives)
    if rule is Acceptance.COUPLED:
        return match(draw(logits, at, len(alternatives)), draft, alternatives)
    return _accept_by_ratio(logits, draft, draft_probs, at)


def offsets(positions: int, alternatives: int) -> list[int]:
    """Of the tokens to draw from the first one: what follows an alternative has the place of a second token."""
    return [*range(positions - alternatives), *[1] * alternatives]


def draw(logits: Tensor, at: DrawAddress, alternatives: int = 0) -> list[int]:
    """The target's own token at each position, shape (positions, vocabulary) -> positions."""
    places = offsets(len(logits), alternatives)
    return [gumbel_argmax(row, at.key(offset, Purpose.DRAW)) for offset, row in zip(places, logits, strict=True)]


def match(own: list[int], draft: tuple[int, ...], alternatives: tuple[int, ...] = ()) -> BlockDecision:
    """The target's own tokens decide: the draft stands as far as it equals them, or an alternative does."""
    if own[0] in alternatives and own[0] != draft[0]:
        return BlockDecision(1, own[len(draft) + 1 + alternatives.index(own[0])], own[0])
    accepted = 0
    while accepted < len(draft) and draft[accepted] == own[accepted]:
        accepted += 1
    return BlockDecision(accepted, own[accepted])


def _accept_by_ratio(
    logits: Tensor, draft: tuple[int, ...], draft_probs: SparseProbs | None, at: DrawAddress
) -> BlockDecision:
    target_probs = torch.softmax(logits.to(torch.float64), dim=-1)
    drafted = target_probs[range(len(draft)), draft].tolist()  # the target's probability of each draft token
    for offset, token in enumerate(draft):
        draft_row = distribution(draft_probs, offset, token)
        if uniform_scalar(at.key(offset, Purpose.ACCEPT)) * draft_row[token] < drafted[offset]:
            continue
        residual = _residual(target_probs[offset], draft_row)
        return BlockDecision(offset, _draw_from(residual, at.key(offset, Purpose.RECOVER)))
    return BlockDecision(len(draft), _draw_from(target_probs[len(draft)], at.key(len(draft), Purpose.DRAW)))


def distribution(draft_probs: SparseProbs | None, offset: int, token: int) -> dict[int, float]:
    """What one draft token was drawn from, by token id; a point mass if nothing else was sent."""
    if draft_probs is None:
        return {token: 1.0}
    total = sum(draft_probs.weights[offset])
    pairs = zip(draft_probs.token_ids[offset], draft_probs.weights[offset], strict=True)
    return {token_id: weight / total for token_id, weight in pairs if weight > 0}


def _residual(target_row: Tensor, draft_row: dict[int, float]) -> Tensor:
    """max(target_probs - draft_probs, 0), not normalised."""
    ids = torch.tensor(list(draft_row), device=target_row.device)
    probs = torch.tensor(list(draft_row.values()), dtype=target_row.dtype, device=target_row.device)
    residual = target_row.index_add(0, ids, -probs).clamp_min(0)
    # Equal distributions leave nothing but rounding: then a rejection has no mass of its own.
    return residual if float(residual.sum()) > 0 else target_row


def _draw_from(probs: Tensor, at: int) -> int:
    """One token from unnormalised probabilities, shape (vocabulary,)."""
    return gumbel_argmax(probs.log(), at)
