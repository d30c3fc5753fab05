"""Autoregressive drafting with a small model: one forward per draft token, all sessions together.

While a block is verified, blocks are drafted for what may come of it: for each place where the target may stop
accepting and each likely token there, by the draft model's own probabilities (a speculation cache: Kumar et al. 2026,
arXiv 2603.03251). Knows nothing of streams or verification.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from actors.cache import FeedRow
from actors.memory import page_bytes, page_count
from actors.methods import TargetNeeds
from actors.methods.draft_cache import Branch, DraftCache
from actors.methods.frequent_tokens import read_frequent_tokens, reduce_head
from actors.models import load_model
from actors.noise import Purpose, gumbel, gumbel_argmax, key
from actors.runner import ModelRunner, Runner
from actors.sampling import process
from cluster.config import CacheConfig
from cluster.drafting import Proposal, Want, block_room
from cluster.pages import PageCopy
from protos.messages import Acceptance, SparseProbs, Verdict
from protos.prefix import extend_hash

WEIGHT_SCALE = 60_000  # the likeliest token's weight; uint16 on the wire
CHOICES = 16  # tokens of a position that are thought of as outcomes
AHEAD_ROWS = 8  # outcomes drafted for together
LEAST_CHANCE = 0.005  # an outcome less likely is not drafted for


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that may come at some position, and how likely the draft model finds it."""

    token: int
    chance: float


@dataclass(frozen=True, slots=True)
class DraftingLimits:
    """How a draft model drafts.

    `top_k` entries of draft_probs are sent per token under ratio. Under the other rules a block that is waited for ends
    where its chance to be accepted so far, by the draft model's own probabilities, has fallen below `min_confidence`;
    under ratio its length may not depend on its tokens. A forward feeds at most `pass_tokens`: longer prompts are read
    over several rounds, so that they neither keep the others' blocks waiting for long nor need more memory than there
    is.
    """

    top_k: int
    min_confidence: float
    pass_tokens: int = 2048


@dataclass
class _Draft:
    """One block while it is being drafted."""

    want: Want
    branch: Branch
    pending: list[int]  # tokens to feed next
    prefix_hash: int  # of all tokens so far, drafted ones included
    max_tokens: int
    outcome: tuple[int, ...] = ()  # guessed verdict that the block comes after
    chance: float = 1.0  # that the outcome comes
    is_root: bool = False  # drafted only for the choices after the tokens under verification
    tokens: list[int] = field(default_factory=list)  # drafted so far
    choices: list[tuple[Choice, ...]] = field(default_factory=list)  # at each of them
    ids: list[tuple[int, ...]] = field(default_factory=list)  # draft_probs, under ratio
    weights: list[tuple[int, ...]] = field(default_factory=list)
    survival: float = 1.0  # chance that all tokens so far are accepted, by the draft model's own probabilities
    done: bool = False

    @property
    def ratio(self) -> bool:
        return self.want.open.acceptance is Acceptance.RATIO and not self.want.open.sampling.greedy

    @property
    def least_chance(self) -> float:
        """Of the tokens so far to stand, to be worth sending."""
        return 0.0 if self.ratio or self.is_root else self.want.least_chance

    @property
    def urgency(self) -> float:
        """How likely the next token is to be of use; under ratio whatever was drafted so far."""
        return self.chance if self.ratio else self.chance * self.survival

    @property
    def position(self) -> int:
        """Of the token to draft next."""
        return len(self.want.tokens) + len(self.outcome) + len(self.tokens)

    @property
    def generated(self) -> list[int]:
        """All tokens after the prompt."""
        return [*self.want.tokens[self.want.open.prompt_len :], *self.outcome, *self.tokens]

    @property
    def address(self) -> tuple[int, tuple[int, ...]]:
        """Base length and tokens."""
        return len(self.want.tokens) + len(self.outcome), tuple(self.tokens)

    def proposal(self, base_hash: int) -> Proposal:
        want = self.want
        probs = SparseProbs(tuple(self.ids), tuple(self.weights)) if self.ratio else None
        base_len, tokens = self.address
        return Proposal(want.open.session, base_len, base_hash, tokens, probs, self.outcome)


_Considered = dict[tuple[int, tuple[int, ...]], list[tuple[Choice, ...]]]
"""By base length and tokens of a block: what else the model thought of at each of its positions."""


class DraftModel:
    """Drafts with a model behind a `Runner`, whose logits' columns are those of `token_ids`, shape (columns,)."""

    needs = TargetNeeds()

    def __init__(
        self,
        runner: Runner,
        token_ids: Tensor,
        cache: DraftCache,
        limits: DraftingLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner, self._token_ids, self._cache, self._limits = runner, token_ids, cache, limits
        self._clock = clock
        self._ids: list[int] = token_ids.tolist()
        self._considered: dict[str, _Considered] = {}  # by session, of the blocks proposed last

    def propose(self, wants: Sequence[Want], interrupted: Callable[[], bool]) -> list[Proposal]:
        sure = [want for want in wants if want.unverified is None]
        ahead = [want for want in wants if want.unverified is not None]
        proposals = self._propose_now(sure) if sure else []
        return proposals + (self._propose_ahead(ahead, interrupted) if ahead else [])

    def observe(self, verdict: Verdict) -> None:
        """Everything it needs comes with the next want."""

    def close(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            self._cache.close(name)
            self._considered.pop(name, None)
        if self._cache.is_idle:
            self._cache.check()

    @property
    def is_idle(self) -> bool:
        return self._cache.is_idle

    # ------------------------------------------------------------ blocks that are wanted for sure

    def _propose_now(self, wants: Sequence[Want]) -> list[Proposal]:
        drafts = [self._begin(want, want.tokens, want.max_tokens) for want in wants]
        self._draft(drafts, lambda: False)
        for draft in drafts:
            self._cache.publish(draft.branch, len(draft.want.tokens))
            self._considered[draft.want.open.session] = {draft.address: draft.choices}
        return [draft.proposal(draft.want.prefix_hash) for draft in drafts]

    def _begin(self, want: Want, tokens: tuple[int, ...], max_tokens: int) -> _Draft:
        branch = self._cache.resume(want.open.session, tokens)
        return _Draft(want, branch, list(tokens[len(branch.tokens) :]), want.prefix_hash, max_tokens)

    # ------------------------------------------------------------ blocks that may be wanted

    def _propose_ahead(self, wants: Sequence[Want], interrupted: Callable[[], bool]) -> list[Proposal]:
        drafts = self._branch_out(wants)
        hashes = [draft.prefix_hash for draft in drafts]
        self._draft(drafts, interrupted, min(want.until for want in wants))
        found = []
        for draft, base_hash in zip(drafts, hashes, strict=True):
            if draft.tokens:
                self._considered[draft.want.open.session][draft.address] = draft.choices
                found.append(draft.proposal(base_hash))
        return found

    def _branch_out(self, wants: Sequence[Want]) -> list[_Draft]:
        """A draft for each likely outcome; the last token of the block is fed first, for what may come after it."""
        roots = [self._begin(want, (*want.tokens, *(want.unverified or ())), 1) for want in wants]
        for root in roots:
            root.outcome, root.is_root = root.want.unverified or (), True
        self._draft(roots, lambda: False)
        each = max(1, AHEAD_ROWS // len(roots))
        # Without choices there was no room for the root: its branch may be too short to fork.
        drafts = [draft for root in roots if root.choices for draft in self._branches_of(root, each)]
        self._considered |= {want.open.session: {} for want in wants}
        return drafts

    def _branches_of(self, root: _Draft, limit: int) -> list[_Draft]:
        want, base, block = root.want, len(root.want.tokens), root.outcome
        known = self._considered.get(want.open.session, {}).get((base, block), [])
        outcomes = likely_outcomes(block, (*known, *root.choices), skipped=len(block) - len(known))
        stops = frozenset(want.open.stop_ids)  # no block follows the end
        drafts: list[_Draft] = []
        for outcome, chance in outcomes:
            room = min(want.max_tokens, block_room(want.open, base + len(outcome)))
            if len(drafts) == limit or chance < LEAST_CHANCE:
                break
            if room <= 0 or not stops.isdisjoint(outcome):
                continue
            branch = self._cache.fork(root.branch, base + len(outcome) - 1)
            prefix_hash = want.prefix_hash
            for token in outcome:
                prefix_hash = extend_hash(prefix_hash, token)
            drafts.append(_Draft(want, branch, [outcome[-1]], prefix_hash, room, outcome, chance))
        return drafts

    # ------------------------------------------------------------ drafting

    def _draft(
        self,
        drafts: Sequence[_Draft],
        interrupted: Callable[[], bool],
        until: float = math.inf,
    ) -> None:
        """Extends all drafts together until each is done, something more urgent interrupts or the time is up.

        Where time is short only the likelier half goes on after each token, so that further tokens come sooner.

        What is not read to its end by then, or has no room in the pool, goes without; the next want goes on from there.
        """
        busy = {draft.want.open.session for draft in drafts}
        active = sorted(drafts, key=lambda draft: len(draft.pending))
        began = ended = self._clock()
        while active and not interrupted() and ended + (ended - began) <= until:  # the next forward takes as long
            began = ended
            rows: list[FeedRow] = []
            copies: list[PageCopy] = []
            fed: list[_Draft] = []
            budget = self._limits.pass_tokens
            for draft in active:
                part, rest = draft.pending[:budget], draft.pending[budget:]
                if part and (feed := self._cache.feed(draft.branch, part, busy)) is not None:
                    rows.append(feed[0])
                    copies += feed[1]
                    fed.append(draft)
                    draft.pending, budget = rest, budget - len(part)
            if not rows:
                return
            logits = self._runner.forward(rows, copies)
            read = [index for index, draft in enumerate(fed) if not draft.pending]
            if read:
                self._extend([fed[index] for index in read], logits if len(read) == len(fed) else logits[read])
            active = [fed[index] for index in read if not fed[index].done]
            if until < math.inf:
                active = sorted(active, key=lambda draft: -draft.urgency)[: -(-len(fed) // 2)]
            ended = self._clock()

    def _extend(self, drafts: Sequence[_Draft], logits: Tensor) -> None:
        """Adds a token to each draft, or ends it; logits (drafts, columns)."""
        simple = [i for i, d in enumerate(drafts) if d.want.open.sampling.greedy and not d.want.open.sampling.penalised]
        if simple:
            part = logits if len(simple) == len(drafts) else logits[simple]
            for index, choices in zip(simple, self._greedy_choices(part), strict=True):
                self._append(drafts[index], choices[0].token, choices)
        for index, draft in enumerate(drafts):
            if index not in simple:
                self._extend_by_sampling(draft, logits[index])

    def _greedy_choices(self, logits: Tensor) -> list[tuple[Choice, ...]]:
        logits = logits.float()
        values, columns = logits.topk(min(CHOICES, logits.shape[-1]), dim=-1)
        chances = (values - logits.logsumexp(dim=-1, keepdim=True)).exp().tolist()
        return [
            tuple(Choice(self._ids[column], chance) for column, chance in zip(*row, strict=True))
            for row in zip(columns.tolist(), chances, strict=True)
        ]

    def _extend_by_sampling(self, draft: _Draft, logits: Tensor) -> None:
        request = draft.want.open
        whole = logits.new_full((self._runner.vocabulary,), -torch.inf)
        whole[self._token_ids] = logits
        generated = draft.generated if request.sampling.penalised else ()
        row = process(whole.unsqueeze(0), request.sampling, generated, ())[0]
        if draft.ratio:
            token = self._draw_by_ratio(draft, row)
            self._append(draft, token, _choices(row))
        else:
            token, choices = self._draw_coupled(draft, row)
            self._append(draft, token, choices)

    def _append(self, draft: _Draft, token: int, choices: tuple[Choice, ...]) -> None:
        draft.survival *= choices[0].chance
        if draft.survival < draft.least_chance:
            draft.done = True
            return
        draft.tokens.append(token)
        draft.choices.append(choices)
        draft.pending = [token]
        draft.prefix_hash = extend_hash(draft.prefix_hash, token)
        # Whoever waits for a block waits for its further tokens too: that takes more than what verifies them.
        is_awaited = draft.want.unverified is None
        in_doubt = is_awaited and not draft.ratio and draft.survival < self._limits.min_confidence
        draft.done |= in_doubt or len(draft.tokens) == draft.max_tokens

    def _draw_coupled(self, draft: _Draft, logits: Tensor) -> tuple[int, tuple[Choice, ...]]:
        """The token that the target would draw from these logits: with the same noise, at the same address."""
        request = draft.want.open
        if request.sampling.greedy:
            return int(logits.argmax()), _choices(logits)
        at = key(request.seed, request.choice, draft.position, Purpose.DRAW)
        token = gumbel_argmax(logits, at)
        ids = logits.topk(min(self._limits.top_k, int(torch.isfinite(logits).sum()))).indices
        noisy = torch.full_like(logits, -torch.inf)
        noisy[ids] = (logits[ids] + gumbel(at, ids)).float()
        return token, _choices(noisy)  # with the noise that decides, so that rivals are those of this very draw

    def _draw_by_ratio(self, draft: _Draft, logits: Tensor) -> int:
        """A token from the truncated and rounded distribution that goes on the wire, and that distribution.

        The noise is a function of seed and prefix: however often and at whatever length a prefix is drafted for,
        its continuation is the same.
        """
        top_k = self._limits.top_k
        logits = logits.masked_fill(~torch.isfinite(logits), -torch.inf)
        if bool(logits.isneginf().all()):  # a model that computes nonsense still gives a token
            logits[self._ids[0]] = 0.0
        values, ids = logits.topk(min(top_k, int(torch.isfinite(logits).sum())))
        weights = (torch.exp(values - values[0]) * WEIGHT_SCALE).round()
        at = key(draft.want.open.seed, draft.want.open.choice, draft.prefix_hash, Purpose.DRAFT)
        token = int(ids[gumbel_argmax(weights.double().log(), at)])
        padding = top_k - len(ids)
        draft.ids.append((*ids.tolist(), *[0] * padding))
        draft.weights.append((*map(int, weights.tolist()), *[0] * padding))
        return token


def _choices(logits: Tensor) -> tuple[Choice, ...]:
    """The likeliest tokens, likeliest first."""
    chances, ids = torch.softmax(logits, dim=-1).topk(min(CHOICES, logits.shape[-1]))
    return tuple(Choice(*row) for row in zip(ids.tolist(), chances.tolist(), strict=True))


def likely_outcomes(
    block: Sequence[int], choices: Sequence[tuple[Choice, ...]], skipped: int
) -> list[tuple[tuple[int, ...], float]]:
    """What a verdict on `block` may bring and how likely, likeliest first.

    `choices` are those at each position of the block and after its end, but for the first `skipped` positions, of
    which nothing is known: they are taken for accepted.
    """
    found = []
    accepted_chance = 1.0
    for position, there in enumerate(choices, start=skipped):
        drafted = block[position] if position < len(block) else None
        for choice in there:
            if choice.token != drafted:
                found.append(((*block[:position], choice.token), accepted_chance * choice.chance))
        accepted_chance *= next((choice.chance for choice in there if choice.token == drafted), 0.0)
    return sorted(found, key=lambda outcome: -outcome[1])


def load_draft_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    cache: CacheConfig,
    sessions: int,
    context: int,
    target_ids: Iterable[int],
    limits: DraftingLimits,
) -> DraftModel:
    """Loads a checkpoint as a drafting method; ids that the target lacks are never proposed."""
    model = load_model(folder, dtype, device)
    rows = int(model.config.get_text_config().vocab_size)
    frequent = read_frequent_tokens(folder, rows)
    proposable = sorted({i for i in target_ids if i < rows} & set(frequent if frequent is not None else range(rows)))
    token_ids = torch.tensor(proposable, device=device)
    if len(token_ids) < rows:
        reduce_head(model, token_ids)
    pages = page_count(cache, page_bytes(model, cache.page_size), sessions, context, device)
    runner = ModelRunner(model, pages, cache.page_size)
    return DraftModel(runner, token_ids, DraftCache(pages, cache.page_size), limits)
