"""From a draft model's logits to draft tokens: the likeliest, those that the target would draw, or drawn for ratio."""

from collections.abc import Iterable, Sequence
from itertools import islice, repeat

import torch
from torch import Tensor

from actors.methods.model.forwards import ReadDraft
from actors.methods.model.limits import DraftingLimits
from actors.sampling.noise import Purpose, gumbel, gumbel_argmax, key
from actors.sampling.processors import process
from cluster.drafting.block_draft import BlockDraft
from cluster.drafting.outcomes import Choices

CHOICES = 16  # tokens of a position that are thought of as outcomes


class DraftSampler:
    """Extends blocks by tokens. Column i of the logits is token `token_ids[i]` of a vocabulary of that size."""

    def __init__(self, token_ids: Tensor, vocabulary: int, limits: DraftingLimits) -> None:
        self._token_ids = token_ids  # (columns,)
        self._vocabulary = vocabulary
        self._limits = limits
        self._ids: list[int] = token_ids.tolist()

    def extend(self, read: Sequence[ReadDraft]) -> None:
        """Adds a token for each place, or ends the block."""
        simple = [each for each in read if is_argmax(each.draft)]
        if simple:
            choices = iter(self._greedy_choices(torch.cat([each.logits for each in simple])))
            for draft, logits, hidden in simple:
                places = len(logits)
                for there, state in zip(islice(choices, places), _each(hidden, places), strict=True):
                    draft.append(there.tokens[0], there, state)
        for draft, logits, hidden in read:
            if not is_argmax(draft):
                for row, state in zip(logits, _each(hidden, len(logits)), strict=True):
                    self._extend_by_sampling(draft, row, state)

    def _greedy_choices(self, logits: Tensor) -> list[Choices]:
        values, columns = torch.log_softmax(logits.float(), dim=-1).topk(min(CHOICES, logits.shape[-1]), dim=-1)
        ids = self._token_ids[columns].tolist()
        chances = values.exp().tolist()
        return [Choices(*row) for row in zip(ids, chances, strict=True)]

    def _extend_by_sampling(self, draft: BlockDraft, logits: Tensor, state: Tensor | None) -> None:
        if draft.is_complete:
            return
        request = draft.text.open
        whole = logits.new_full((self._vocabulary,), -torch.inf)
        whole[self._token_ids[: len(logits)]] = logits  # a draft head may choose among fewer
        generated = draft.generated if request.sampling.penalised else ()
        row = process(whole.unsqueeze(0), request.sampling, generated)[0]
        if draft.ratio:
            token, ids, weights = self._draw_by_ratio(draft, row)
            draft.append(token, _choices(row), state, ids, weights)
        else:
            token, choices = self._draw_coupled(draft, row)
            draft.append(token, choices, state)

    def _draw_coupled(self, draft: BlockDraft, logits: Tensor) -> tuple[int, Choices]:
        """The token that the target would draw from these logits: with the same noise, at the same address."""
        request = draft.text.open
        if request.sampling.greedy:
            return int(logits.argmax()), _choices(logits)
        at = key(request.seed, request.choice, draft.position, Purpose.DRAW)
        token = gumbel_argmax(logits, at)
        ids = logits.topk(min(self._limits.top_k, int(torch.isfinite(logits).sum()))).indices
        noisy = torch.full_like(logits, -torch.inf)
        noisy[ids] = (logits[ids] + gumbel(at, ids)).float()
        return token, _choices(noisy)  # with the noise that decides, so that rivals are those of this very draw

    def _draw_by_ratio(self, draft: BlockDraft, logits: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """A token from the truncated and rounded distribution that goes on the wire, and that distribution.

        The noise is a function of seed and prefix: however often and at whatever length a prefix is drafted for,
        its continuation is the same.
        """
        top_k = self._limits.top_k
        logits = logits.masked_fill(~torch.isfinite(logits), -torch.inf)
        if bool(logits.isneginf().all()):  # a model that computes nonsense still gives a token
            logits[self._ids[0]] = 0.0
        values, ids = logits.topk(min(top_k, int(torch.isfinite(logits).sum())))
        weights = (torch.exp(values - values[0]) * self._limits.weight_scale).round()
        session = draft.text.open
        at = key(session.seed, session.choice, draft.prefix_hash, Purpose.DRAFT)
        token = int(ids[gumbel_argmax(weights.double().log(), at)])
        padding = top_k - len(ids)
        return token, (*ids.tolist(), *[0] * padding), (*map(int, weights.tolist()), *[0] * padding)


def is_argmax(draft: BlockDraft) -> bool:
    """Whether its tokens are the likeliest ones."""
    sampling = draft.text.open.sampling
    return sampling.greedy and not sampling.penalised


def _choices(logits: Tensor) -> Choices:
    """The likeliest tokens, likeliest first."""
    chances, ids = torch.softmax(logits, dim=-1).topk(min(CHOICES, logits.shape[-1]))
    return Choices(ids.tolist(), chances.tolist())


def _each(states: Tensor | None, tokens: int) -> Iterable[Tensor | None]:
    """Of every token, (hidden,)."""
    return repeat(None, tokens) if states is None else states
