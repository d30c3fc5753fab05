"""The two acceptance rules for one block, as the specification: which draft tokens stand, and which token follows.

Two exact rules; greedy is the special case of both.

coupled: the target draws every position itself, as argmax(logits + Gumbel noise), with noise that the drafter
    used too. A draft token stands where it equals the target's own draw, so a tree of them is walked down from the
    prefix, each time to the child that the target says. The output is a function of prefix, parameters and seed
    alone (Daliri et al. 2024, arXiv 2408.07978).
ratio: a draft token x stands with probability min(1, target_probs[x] / draft_probs[x]); after a rejection the
    recovered token is drawn from normalised max(target_probs - draft_probs, 0) (Leviathan et al. 2023,
    arXiv 2211.17192). Without probabilities a draft token is a point mass. It decides about chains.

This is the specification, one block at a time; a step decides all of its blocks together (`rejection_sampler.py`).
Knows nothing of sessions' ends: what follows a stop id is cut elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.sampling.gumbel import Purpose, gumbel_argmax, key, uniform_scalar
from protos.draft_tree import DraftTree, SparseProbs
from protos.messages import Acceptance


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
    """The nodes on `path` stand, each after the one before; `next_token` is the recovered or bonus token.

    Where `is_finite` is false, some of the logits were NaN or +inf, or a row had nothing but -inf: nothing is decided.
    """

    path: tuple[int, ...]
    next_token: int
    is_finite: bool = True


NOT_DECIDED = BlockDecision((), 0, is_finite=False)


def accept(rule: Acceptance, greedy: bool, logits: Tensor, draft: DraftTree, at: DrawAddress) -> BlockDecision:
    """Decides one block; `logits` are processed, (1 + nodes, vocabulary): after the prefix and after each node."""
    if greedy:
        return match(logits.argmax(dim=-1).tolist(), draft)
    if rule is Acceptance.COUPLED:
        return match(draw(logits, draft, at), draft)
    return _accept_by_ratio(logits, draft, at)


def offsets(draft: DraftTree) -> list[int]:
    """Of the tokens to draw, from the first one on: whatever comes after a node has the place after its own."""
    return [0, *[depth + 1 for depth in draft.depths]]


def draw(logits: Tensor, draft: DraftTree, at: DrawAddress) -> list[int]:
    """The target's own token after the prefix and after each node, shape (1 + nodes, vocabulary) -> 1 + nodes."""
    drawn = zip(offsets(draft), logits, strict=True)
    return [gumbel_argmax(row, at.key(offset, Purpose.DRAW)) for offset, row in drawn]


def match(own: Sequence[int], draft: DraftTree) -> BlockDecision:
    """The target's own tokens decide: from each node that stands on to the child that has the token after it."""
    path: list[int] = []
    last = -1
    for node, parent in enumerate(draft.parents):  # a node's children come after it
        if parent == last and draft.tokens[node] == own[last + 1]:
            path.append(node)
            last = node
    return BlockDecision(tuple(path), own[last + 1])


def _accept_by_ratio(logits: Tensor, draft: DraftTree, at: DrawAddress) -> BlockDecision:
    assert draft.is_chain, "the ratio rule decides about chains"
    count = len(draft)
    path = tuple(range(count))
    target_probs = torch.softmax(logits.to(torch.float64), dim=-1)
    drafted = target_probs[range(count), draft.tokens].tolist()  # the target's probability of each draft token
    for offset, token in enumerate(draft.tokens):
        draft_row = distribution(draft.probs, offset, token)
        if uniform_scalar(at.key(offset, Purpose.ACCEPT)) * draft_row[token] < drafted[offset]:
            continue
        residual = _residual(target_probs[offset], draft_row)
        return BlockDecision(path[:offset], _draw_from(residual, at.key(offset, Purpose.RECOVER)))
    return BlockDecision(path, _draw_from(target_probs[count], at.key(count, Purpose.DRAW)))


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
