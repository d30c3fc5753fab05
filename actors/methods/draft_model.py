"""Autoregressive drafting with a small model: one forward per draft token, all sessions together.

The cache of a session holds a prefix of its tokens plus what was drafted last; where they agree with the new
tokens, nothing is fed again. Knows nothing of streams or verification.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from actors.cache import FeedRow
from actors.methods import TargetNeeds
from actors.methods.frequent_tokens import read_frequent_tokens, reduce_head
from actors.models import load_model
from actors.noise import Purpose, gumbel_argmax, key
from actors.runner import ModelRunner, Runner
from actors.sampling import process
from cluster.drafting import Proposal, Want
from protos.messages import Acceptance, SparseProbs, Verdict
from protos.prefix import extend_hash

WEIGHT_SCALE = 60_000  # the likeliest token's weight; uint16 on the wire


@dataclass
class _Draft:
    """One want while it is being drafted."""

    want: Want
    slot: int
    cached: list[int]  # tokens in the slot
    pending: list[int]  # tokens to feed next, after the cached ones
    tokens: list[int] = field(default_factory=list)  # drafted so far
    prefix_hash: int = 0
    ids: list[tuple[int, ...]] = field(default_factory=list)  # draft_probs, under ratio
    weights: list[tuple[int, ...]] = field(default_factory=list)
    survival: float = 1.0  # chance that all tokens so far are accepted, by the draft model's own probabilities
    done: bool = False

    @property
    def ratio(self) -> bool:
        return self.want.open.acceptance is Acceptance.RATIO and not self.want.open.sampling.greedy

    def feed(self) -> FeedRow:
        """The pending tokens, the last of which gives logits; from here on they count as cached."""
        row = FeedRow(self.slot, tuple(self.pending), len(self.cached), logits=1)
        self.cached += self.pending
        return row


class DraftModel:
    """Drafts with a model behind a `Runner`.

    `allowed` is true for token ids that the target has, shape (vocabulary,). `top_k` entries of draft_probs are
    sent per token under ratio. Under the other rules a block ends where its chance to be accepted so far, by the
    draft model's own probabilities, falls below `min_confidence`; under ratio its length may not depend on its tokens.
    """

    needs = TargetNeeds()

    def __init__(self, runner: Runner, allowed: Tensor, top_k: int, min_confidence: float) -> None:
        self._runner = runner
        self._slots = len(runner.free_slots)
        self._excluded = ~allowed
        self._top_k, self._min_confidence = top_k, min_confidence
        self._cached: dict[str, tuple[int, list[int]]] = {}  # slot and tokens in it, by session

    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        drafts = [self._begin(want) for want in wants]
        active = list(drafts)
        while active:
            logits = self._runner.forward([draft.feed() for draft in active])
            logits = logits.masked_fill(self._excluded, -torch.inf)
            for draft, row in zip(active, logits, strict=True):
                self._extend(draft, row)
            active = [draft for draft in active if not draft.done]
        return [self._proposal(draft) for draft in drafts]

    def observe(self, verdict: Verdict) -> None:
        """Everything it needs comes with the next want."""

    def close(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            if name in self._cached:
                slot, _ = self._cached.pop(name)
                self._runner.free_slots.append(slot)
        held = [slot for slot, _ in self._cached.values()]
        assert sorted([*held, *self._runner.free_slots]) == list(range(self._slots)), "slots were lost or shared"

    @property
    def is_idle(self) -> bool:
        return not self._cached

    def _begin(self, want: Want) -> _Draft:
        name = want.open.session
        if name not in self._cached:
            self._cached[name] = (self._runner.free_slots.pop(), [])
        slot, cached = self._cached[name]
        common = min(len(cached), len(want.tokens) - 1)  # the last token is always fed: its logits are wanted
        if tuple(cached[:common]) != want.tokens[:common]:
            common = next(i for i, (old, new) in enumerate(zip(cached, want.tokens, strict=False)) if old != new)
        del cached[common:]
        return _Draft(want, slot, cached, list(want.tokens[common:]), prefix_hash=want.prefix_hash)

    def _extend(self, draft: _Draft, logits: Tensor) -> None:
        """Adds one token to a draft, or ends it."""
        request = draft.want.open
        generated = [*draft.want.tokens[request.prompt_len :], *draft.tokens] if request.sampling.penalised else ()
        row = process(logits.unsqueeze(0), request.sampling, generated, ())[0]
        if draft.ratio:
            token = self._draw_by_ratio(draft, row)
        else:
            token = self._draw_coupled(draft, row)
            if self._becomes_doubtful(draft, row, token):
                return
        draft.tokens.append(token)
        draft.pending = [token]
        draft.prefix_hash = extend_hash(draft.prefix_hash, token)
        draft.done |= len(draft.tokens) == draft.want.max_tokens

    def _becomes_doubtful(self, draft: _Draft, logits: Tensor, token: int) -> bool:
        """Ends a draft that is not likely enough to be accepted this far, and says whether it ends before `token`.

        A guess at what the target adds is no part of a block and does not count; a block's first token stays even
        if it is doubtful, but nothing is drafted after it.
        """
        if self._min_confidence == 0 or len(draft.tokens) < draft.want.ahead:
            return False
        draft.survival *= float(torch.softmax(logits, dim=-1)[token])
        draft.done = draft.survival < self._min_confidence
        return draft.done and len(draft.tokens) > draft.want.ahead

    def _draw_coupled(self, draft: _Draft, logits: Tensor) -> int:
        """The token that the target would draw from these logits: with the same noise, at the same address."""
        request = draft.want.open
        if request.sampling.greedy:
            return int(logits.argmax())
        position = len(draft.want.tokens) + len(draft.tokens)
        at = key(request.seed, request.choice, position, Purpose.DRAW)
        return gumbel_argmax(logits, at)

    def _draw_by_ratio(self, draft: _Draft, logits: Tensor) -> int:
        """A token from the truncated and rounded distribution that goes on the wire, and that distribution.

        The noise is a function of seed and prefix: however often and at whatever length a prefix is drafted for,
        its continuation is the same.
        """
        values, ids = logits.topk(min(self._top_k, int(torch.isfinite(logits).sum())))
        weights = (torch.exp(values - values[0]) * WEIGHT_SCALE).round()
        at = key(draft.want.open.seed, draft.want.open.choice, draft.prefix_hash, Purpose.DRAFT)
        token = int(ids[gumbel_argmax(weights.double().log(), at)])
        padding = self._top_k - len(ids)
        draft.ids.append((*ids.tolist(), *[0] * padding))
        draft.weights.append((*map(int, weights.tolist()), *[0] * padding))
        return token

    def _proposal(self, draft: _Draft) -> Proposal:
        want = draft.want
        probs = SparseProbs(tuple(draft.ids), tuple(draft.weights)) if draft.ratio else None
        return Proposal(want.open.session, len(want.tokens), want.prefix_hash, tuple(draft.tokens), probs, want.ahead)


def load_draft_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    slots: int,
    context: int,
    target_ids: Iterable[int],
    top_k: int,
    min_confidence: float,
) -> DraftModel:
    """Loads a checkpoint as a drafting method; ids that the target lacks are never proposed."""
    model = load_model(folder, dtype, device)
    frequent = read_frequent_tokens(folder, int(model.config.get_text_config().vocab_size))
    if frequent is not None:
        reduce_head(model, frequent)
    runner = ModelRunner(model, slots, context)
    allowed = torch.zeros(runner.vocabulary, dtype=torch.bool, device=device)
    allowed[[token_id for token_id in target_ids if token_id < runner.vocabulary]] = True
    return DraftModel(runner, allowed, top_k, min_confidence)
