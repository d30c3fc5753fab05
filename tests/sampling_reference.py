"""Reference implementation of both acceptance rules, one position at a time; the oracle for `actors.sampling`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.sampling.acceptance import BlockDecision, DrawAddress, distribution, match, offsets
from actors.sampling.gumbel import Purpose, gumbel_argmax, uniform_scalar
from actors.sampling.logits_processors import Penalties, paths_of
from actors.sampling.truncation import filtered
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Sampling


def process(logits: Tensor, sampling: Sampling, generated: Sequence[int], draft: DraftTree = NO_TREE) -> Tensor:
    """Returns scaled and masked logits, float32, shape (positions, vocabulary) like `logits`.

    Row 0 is the distribution after `generated`; row 1 + i is the distribution after node i of `draft`. The softmax of a
    row is the request's distribution; excluded tokens are -inf. The repetition penalty covers only `generated`, because
    there is no prompt.
    """
    logits = logits.to(torch.float32, copy=True)
    if sampling.penalized:
        penalties = Penalties(sampling)
        penalties.advance(generated)
        penalties.apply(logits, paths_of(draft))
    return filtered(logits, sampling)


def accept(rule: Acceptance, greedy: bool, logits: Tensor, draft: DraftTree, at: DrawAddress) -> BlockDecision:
    """Decides one block from processed logits, (1 + nodes, vocabulary), after the prefix and after each node."""
    if greedy:
        return match(logits.argmax(dim=-1).tolist(), draft)
    if rule is Acceptance.COUPLED:
        return match(draw(logits, draft, at), draft)
    return _accept_by_rejection(logits, draft, at)


def draw(logits: Tensor, draft: DraftTree, at: DrawAddress) -> list[int]:
    """Draws the target's tokens after the prefix and after each node: (1 + nodes, vocabulary) -> (1 + nodes,)."""
    drawn = zip(offsets(draft), logits, strict=True)
    return [gumbel_argmax(row, at.key(offset, Purpose.DRAW)) for offset, row in drawn]


def _accept_by_rejection(logits: Tensor, draft: DraftTree, at: DrawAddress) -> BlockDecision:
    assert draft.is_chain, "rejection sampling supports only chains"
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


def _residual(target_row: Tensor, draft_row: dict[int, float]) -> Tensor:
    """Returns max(target_probs - draft_probs, 0), not normalized."""
    ids = torch.tensor(list(draft_row), device=target_row.device)
    probs = torch.tensor(list(draft_row.values()), dtype=target_row.dtype, device=target_row.device)
    residual = target_row.index_add(0, ids, -probs).clamp_min(0)
    # With equal distributions, the residual is only rounding error and has no mass to sample from.
    return residual if float(residual.sum()) > 0 else target_row


def _draw_from(probs: Tensor, at: int) -> int:
    """Draws one token from unnormalized probabilities, shape (vocabulary,)."""
    return gumbel_argmax(probs.log(), at)
