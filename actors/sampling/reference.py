"""The two acceptance rules for one block, as the specification: which draft tokens are accepted, and what follows.

Both are exact; greedy decoding is the special case of both.

* Gumbel coupling (`coupled`): the target draws every position itself, as argmax(logits + Gumbel noise), with noise that
the drafter used too. A draft token is accepted if it equals the target's own draw, so a tree is walked from its root to
the child with the target's token each time. The output is a function of prefix, parameters and seed alone (Daliri et
al. 2024, arXiv 2408.07978).
* Rejection sampling (`ratio`): a draft token x is accepted with probability min(1, target_probs[x] / draft_probs[x]);
after a rejection, the recovered token is drawn from the normalised max(target_probs - draft_probs, 0) (Leviathan et al.
2023, arXiv 2211.17192). A draft token without probabilities is a point mass. Chains only.

A step decides all of its blocks together (`rejection_sampler.py`). Text after a stop id is cut elsewhere.
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
    """Address of a session's noise; `position` is that of the first token to decide."""

    seed: int
    choice: int
    position: int

    def key(self, offset: int, purpose: Purpose) -> int:
        return key(self.seed, self.choice, self.position + offset, purpose)


@dataclass(frozen=True, slots=True)
class BlockDecision:
    """The accepted nodes on `path`, from the root, and `next_token`, the recovered or bonus token.

    If `is_finite` is false, logits were NaN or +inf, or a row had only -inf: nothing is decided.
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
    """Returns the positions of the tokens to draw, relative to the first; a node's successor is one after the node."""
    return [0, *[depth + 1 for depth in draft.depths]]


def draw(logits: Tensor, draft: DraftTree, at: DrawAddress) -> list[int]:
    """Draws the target's own token after the prefix and after each node, shape (1 + nodes, vocabulary) -> 1 + nodes."""
    drawn = zip(offsets(draft), logits, strict=True)
    return [gumbel_argmax(row, at.key(offset, Purpose.DRAW)) for offset, row in drawn]


def match(own: Sequence[int], draft: DraftTree) -> BlockDecision:
    """Accepts nodes by the target's own tokens: from each accepted node to the child that equals the next token."""
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
    """Returns the distribution that one draft token was drawn from, by token id; a point mass if none was sent."""
    if draft_probs is None:
        return {token: 1.0}
    total = sum(draft_probs.weights[offset])
    pairs = zip(draft_probs.token_ids[offset], draft_probs.weights[offset], strict=True)
    return {token_id: weight / total for token_id, weight in pairs if weight > 0}


def _residual(target_row: Tensor, draft_row: dict[int, float]) -> Tensor:
    """Returns max(target_probs - draft_probs, 0), not normalised."""
    ids = torch.tensor(list(draft_row), device=target_row.device)
    probs = torch.tensor(list(draft_row.values()), dtype=target_row.dtype, device=target_row.device)
    residual = target_row.index_add(0, ids, -probs).clamp_min(0)
    # With equal distributions, the residual is only rounding error and has no mass to sample from.
    return residual if float(residual.sum()) > 0 else target_row


def _draw_from(probs: Tensor, at: int) -> int:
    """Draws one token from unnormalised probabilities, shape (vocabulary,)."""
    return gumbel_argmax(probs.log(), at)
