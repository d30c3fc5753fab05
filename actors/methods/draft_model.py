"""Drafting with a small model, all sessions together, and ahead of verdicts.

While a block is verified, blocks are drafted for what may come of it: for each place where the target may stop
accepting and each likely token there, by the draft model's own probabilities (a speculation cache: Kumar et al. 2026,
arXiv 2603.03251).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

import torch
from torch import Tensor

from actors.attention.batch import Interrupted, never
from actors.compute.kv_cache import FeedRow
from actors.engine.runner import InterruptibleRunner
from actors.methods.model.block_draft import BlockDraft, DraftedToken
from actors.methods.model.draft_cache import DraftCache
from actors.methods.model.pard import ONE_AT_A_TIME, MaskTokens
from actors.methods.model.recurrent_head import DraftHead
from actors.models.forward_output import ForwardOutput
from actors.sampling.noise import Purpose, gumbel, gumbel_argmax, key
from actors.sampling.processors import process
from cluster.drafting.forward_time import ForwardTime
from cluster.drafting.method import Early, dismiss
from cluster.drafting.outcomes import Choices, Outcome, accepted_chance, continuations, rejections
from cluster.drafting.requests import Proposal, Want, max_block_len
from cluster.page_allocator import PageCopy
from protos.prefix import extend_hash, hashes_after

CHOICES = 16  # tokens of a position that are thought of as outcomes
AHEAD_ROWS = 8  # most rows of a forward for what may be wanted: so many, or so many for each session
ROWS_EACH = 2
OUTCOMES = 8  # that are drafted for after a rejection; as many where there is none
GUESSED = 16  # the same where a recurrent head names their first tokens; of so many in a pass it does
GUESS_TOKENS = 2  # each
LEAST_CHANCE = 0.01  # an outcome less likely is not drafted for
FEW = 4  # decided tokens that are fed once more for each alternative
ALTERNATIVE_FIRST = 0.5  # how urgent it is to read an alternative under verification; to read the block itself is 1


@dataclass(frozen=True, slots=True)
class DraftingLimits:
    """How a draft model drafts.

    `top_k` entries of draft_probs are sent per token under ratio, as whole weights of which the likeliest token's is
    `weight_scale`: uint16 on the wire. Not under ratio, a block that is waited for ends once its chance to be accepted
    so far is below `min_confidence`: whoever waits for a block waits for its further tokens too, and that takes more
    than what verifies them. A forward feeds at most `pass_tokens`: longer prompts are read over several rounds, so that
    they neither keep the others' blocks waiting for long nor need more memory than there is.
    """

    top_k: int
    min_confidence: float = 0.0
    pass_tokens: int = 2048
    weight_scale: int = 60_000


@dataclass(frozen=True, slots=True)
class _Read:
    """States at the places where the verdict over a block may stop accepting, by the tokens accepted up to there."""

    base_len: int  # tokens before the block
    states: dict[tuple[int, ...], Tensor]  # each (hidden,)


_Considered = dict[tuple[int, tuple[int, ...]], list[DraftedToken]]
"""By hash of what a block comes after, and its tokens: what the model thought of at its first positions."""


class DraftModel:
    """Drafts with a model behind a `Runner`, whose logits' columns are those of `token_ids`, shape (columns,).

    Those of `further` tokens may be only the first of them.
    """

    def __init__(
        self,
        runner: InterruptibleRunner,
        token_ids: Tensor,
        cache: DraftCache,
        limits: DraftingLimits,
        clock: Callable[[], float] = time.monotonic,
        masks: MaskTokens = ONE_AT_A_TIME,
        further: DraftHead | None = None,
    ) -> None:
        self._runner = runner
        self._token_ids = token_ids
        self._cache = cache
        self._limits = limits
        self._clock = clock
        self._masks = masks
        self._further = further
        self._ids: list[int] = token_ids.tolist()
        self._ahead_time = ForwardTime()
        self._considered: dict[str, _Considered] = {}  # by session, of the blocks proposed last
        self._read: dict[str, _Read] = {}  # by session, of the block read last

    @property
    def tokens_per_forward(self) -> int:
        return self._further.width if self._further else self._masks.width

    def propose(self, wants: Sequence[Want], interrupted: Callable[[], bool], early: Early = dismiss) -> list[Proposal]:
        sure = [want for want in wants if want.unverified is None]
        ahead = [want for want in wants if want.unverified is not None]
        proposals = self._propose_now(sure) if sure else []
        return proposals + (self._propose_ahead(ahead, interrupted, early) if ahead else [])

    def close(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            self._cache.close(name)
            self._considered.pop(name, None)
            self._read.pop(name, None)
        if self._cache.is_idle:
            self._cache.check()

    @property
    def is_idle(self) -> bool:
        return self._cache.is_idle

    # ------------------------------------------------------------ blocks that are wanted for sure

    def _propose_now(self, wants: Sequence[Want]) -> list[Proposal]:
        drafts = [self._begin(want, want.tokens, want.max_tokens) for want in wants]
        for draft in drafts:
            draft.min_confidence = 0.0 if draft.ratio else self._limits.min_confidence
        self._name_at_once(drafts)
        active = [draft for draft in drafts if not draft.drafted]
        busy = _sessions(wants)
        while active:
            active = [draft for draft in self._advance(active, busy) if not draft.is_complete]
        for draft in drafts:
            self._cache.publish(draft.branch, len(draft.want.tokens))
            self._considered[draft.want.open.session] = {draft.address: draft.by_model}
        return [draft.proposal() for draft in drafts]

    def _name_at_once(self, drafts: Sequence[BlockDraft]) -> None:
        """Has the recurrent head name what follows verdicts, if the states just before their last tokens are known.

        A forward would name it better, but takes several times as long, and the target may be waiting. Where one of the
        sessions needs a forward, all have it: their blocks leave together.
        """
        found = [self._state_before_last(draft) for draft in drafts]
        if self._further is not None and all(state is not None for state in found):
            for draft, state in zip(drafts, found, strict=True):
                draft.state = state
            self._go_on(drafts, self._further, GUESS_TOKENS, never)

    def _state_before_last(self, draft: BlockDraft) -> Tensor | None:
        """What the logits of the last decided token's place were made of, (hidden,), if that was read and will do."""
        tokens = draft.want.tokens
        read = self._read.pop(draft.want.open.session, None)
        if read is None or read.base_len >= len(tokens) or not _is_argmax(draft):
            return None
        return read.states.get(tokens[read.base_len : -1])

    def _begin(self, want: Want, tokens: tuple[int, ...], max_tokens: int) -> BlockDraft:
        branch = self._cache.resume(want.open.session, tokens)
        return BlockDraft(want, branch, list(tokens[len(branch.tokens) :]), want.prefix_hash, max_tokens)

    # ------------------------------------------------------------ blocks that may be wanted

    def _propose_ahead(self, wants: Sequence[Want], interrupted: Callable[[], bool], early: Early) -> list[Proposal]:
        guesses = self._draft_ahead(wants, interrupted, early)
        self._considered |= {want.open.session: {} for want in wants}
        for draft in guesses:
            self._considered[draft.want.open.session][draft.address] = draft.by_model
        return _proposals(guesses)

    def _draft_ahead(self, wants: Sequence[Want], interrupted: Callable[[], bool], early: Early) -> list[BlockDraft]:
        """Blocks for what the verdicts may bring, by the likeliest tokens first, each until its verdict is due.

        What there is after each forward is told early; under ratio, where one version must do, what is complete.
        """
        begun = [draft for want in wants for draft in self._begin_ahead(want)]
        self._guess(begun, interrupted)
        open_ends = begun
        busy = _sessions(wants)
        limit = max(AHEAD_ROWS, ROWS_EACH * len(wants))
        took_s = 0.0  # the latest forward, and the next one will take as long
        while not interrupted():
            due = (began := self._clock()) + took_s
            open_ends = sorted([d for d in open_ends if due <= d.want.until], key=lambda draft: -draft.urgency)
            if not open_ends:
                break
            rows = self._rows_ahead(limit, min(draft.want.until for draft in open_ends) - began)
            chosen = open_ends[:rows]
            open_ends = open_ends[rows:]
            advanced = self._advance(chosen, busy, interrupted)
            took_s = self._clock() - began
            if advanced:
                self._ahead_time.learn(len(chosen), took_s)
            self._remember([draft for draft in advanced if draft.is_root])
            after = [d for draft in advanced if draft.is_root for d in self._branch_out(draft, self._outcomes(draft))]
            self._guess(after, interrupted)
            begun += after
            open_ends += after + [draft for draft in advanced if not draft.is_root and not draft.is_done]
            early(_proposals([draft for draft in begun if draft.is_done or not draft.ratio]))
        return [draft for draft in begun if not draft.is_root]

    def _remember(self, roots: Sequence[BlockDraft]) -> None:
        """What was read of blocks under verification."""
        for root in roots:
            base_len = len(root.want.tokens)
            session = root.want.open.session
            if (read := self._read.get(session)) is None or read.base_len != base_len:
                read = self._read[session] = _Read(base_len, {})
            for place, token in enumerate(root.drafted):
                if token.state is not None:
                    read.states[root.tokens[:place]] = token.state

    def _rows_ahead(self, limit: int, left_s: float) -> int:
        """Two forwards of few rows bring the likeliest blocks sooner, and further, than one of many."""
        twice = self._ahead_time.most_rows(limit, left_s / 2)
        return twice or self._ahead_time.most_rows(limit, left_s) or 1

    def _begin_ahead(self, want: Want) -> list[BlockDraft]:
        """The root, and drafts for a rejection if what may follow the tokens before it is known already.

        Where a recurrent head, or a lookup, named some of the block, the root reads what the model thinks of them.
        """
        block = want.unverified or ()
        known = self._considered.get(want.open.session, {}).get((want.prefix_hash, block), [])
        root = self._begin(want, (*want.tokens, *block), len(block) + 1)
        root.unverified = block
        root.drafted = list(known)
        root.settled = len(known)
        while root.missing > len(root.pending):  # it is cached what the model would have to read
            token = block[len(root.drafted)]
            root.drafted.append(DraftedToken(token, Choices((token,), (1.0,)), root.p_accepted, root.prefix_hash))
            root.settled = len(root.drafted)
        root.logits = root.missing
        roots = [root, *self._alternatives_of(root)]
        if root.logits > 1:
            return roots
        return [*roots, *self._branch_out(root, rejections(block, root.choices, want.alternatives))]

    def _alternatives_of(self, root: BlockDraft) -> list[BlockDraft]:
        """A root for each alternative under verification."""
        want = root.want
        cached = min(len(root.branch.tokens), len(root.want.tokens))
        roots = []
        is_known = len(want.tokens) - cached <= FEW  # else each alternative would have the prompt read once more
        for token in want.alternatives if is_known else ():
            branch = self._cache.fork(root.branch, cached)
            prefix_hash = extend_hash(want.prefix_hash, token)
            found = BlockDraft(want, branch, [*want.tokens[cached:], token], want.prefix_hash, max_tokens=2)
            found.unverified = (token,)
            found.main = root
            found.chance = ALTERNATIVE_FIRST
            found.settled = 1
            found.drafted = [DraftedToken(token, Choices((token,), (1.0,)), 1.0, prefix_hash)]
            roots.append(found)
        return roots

    def _outcomes(self, root: BlockDraft) -> list[Outcome]:
        """What the verdict may bring of which the root has told just now."""
        block = root.unverified or ()
        (*there, after) = root.choices
        if root.main is not None:
            first = root.main.choices[:1]
            return continuations(block, accepted_chance(block, first), after) if first else []
        told = rejections(block, there, root.want.alternatives) if root.logits > 1 else []
        return told + continuations(block, accepted_chance(block, there), after)

    def _branch_out(self, root: BlockDraft, outcomes: list[Outcome]) -> list[BlockDraft]:
        """A draft for each of the likeliest outcomes whose tokens, but for the last, are cached."""
        want = root.want
        base = len(root.want.tokens)
        stops = frozenset(want.open.stop_ids)  # no block follows the end
        drafts: list[BlockDraft] = []
        most = OUTCOMES if self._further is None else GUESSED
        for outcome, chance in sorted(outcomes, key=lambda outcome: -outcome[1])[:most]:
            most_tokens = want.max_tokens - (root.main is not None)  # its place is taken by the alternative, fed again
            room = min(most_tokens, max_block_len(want.open, base + len(outcome)))
            cached = base + len(outcome) - 1
            if chance < LEAST_CHANCE or room <= 0 or not stops.isdisjoint(outcome) or cached > len(root.branch.tokens):
                continue
            base_hash = hashes_after(want.prefix_hash, outcome)[-1]
            branch = self._cache.fork(root.branch, cached)
            state = root.drafted[len(outcome) - 1].state
            drafts.append(BlockDraft(want, branch, [outcome[-1]], base_hash, room, outcome, chance, state))
        return drafts

    def _guess(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None:
        """Has the recurrent head name blocks at once, which forwards name anew while there is time.

        Not where a prefix must keep its continuation, nor where tokens are sampled, which takes as long as a forward.
        """
        if self._further is not None:
            may = [draft for draft in drafts if draft.state is not None and _is_argmax(draft)]
            likeliest = sorted(may, key=lambda draft: -draft.chance)[:GUESSED]
            self._go_on(likeliest, self._further, GUESS_TOKENS, interrupted)

    # ------------------------------------------------------------ drafting

    def _advance(
        self, drafts: Sequence[BlockDraft], busy: set[str], interrupted: Callable[[], bool] = never
    ) -> list[BlockDraft]:
        """One forward for all of them; those that were read to their end and so have more tokens, or are done.

        What is not read to its end, or has no room in the pool, goes without; the next want goes on from there.
        """
        rows: list[FeedRow] = []
        copies: list[PageCopy] = []
        fed: list[BlockDraft] = []
        budget = self._limits.pass_tokens
        for draft in sorted(drafts, key=lambda draft: len(draft.pending)):
            part = draft.pending[:budget]
            rest = draft.pending[budget:]
            masks = () if rest or draft.is_root else self._masks.after(draft.missing)[: budget - len(part)]
            wanted = 1 if rest else draft.logits
            if part and (feed := self._cache.feed(draft.branch, part, busy, masks, wanted)) is not None:
                rows.append(feed[0])
                copies += feed[1]
                fed.append(draft)
                draft.pending = rest
                budget = budget - len(part) - len(masks)
        if not rows:
            return []
        sizes = [row.logits for row in rows]
        try:
            output = self._runner.forward(rows, copies, interrupted)
        except Interrupted:
            for draft, row in zip(fed, rows, strict=True):
                self._cache.cut(draft.branch, row.start)
            return []
        logits = torch.split(output.logits, sizes)
        states = [None] * len(rows) if self._further is None else torch.split(_hidden(output), sizes)
        for draft, row in zip(fed, rows, strict=True):
            if not draft.is_root and row.logits > 1:
                self._cache.drop_masks(draft.branch)
        read = [index for index, draft in enumerate(fed) if not draft.pending]
        found = [fed[index] for index in read]
        for draft in found:
            draft.forget_guesses()
        self._extend(found, [logits[index] for index in read], [states[index] for index in read])
        for draft in found:
            draft.settle()
        if self._further is not None:
            self._go_on(found, self._further, self._further.width - 1, interrupted)
        for draft in found:
            if not draft.is_complete:
                draft.settle()
        return found

    def _go_on(
        self, drafts: Sequence[BlockDraft], further: DraftHead, tokens: int, interrupted: Callable[[], bool]
    ) -> None:
        """Up to so many further tokens after the last one of each draft."""
        for _ in range(tokens):
            drafts = [draft for draft in drafts if not draft.is_complete]
            if not drafts or interrupted():
                return
            for draft in drafts:
                draft.is_guessed = True
            states, taken = zip(*[draft.last for draft in drafts], strict=True)
            output = further.predict_next(torch.stack(states), taken)
            self._extend(drafts, torch.split(output.logits, 1), torch.split(_hidden(output), 1))

    def _extend(self, drafts: Sequence[BlockDraft], logits: Sequence[Tensor], states: Sequence[Tensor | None]) -> None:
        """Adds tokens to each draft, or ends it; logits (tokens, columns) and states (tokens, hidden) for each."""
        simple = [index for index, draft in enumerate(drafts) if _is_argmax(draft)]
        if simple:
            parts = [logits[index] for index in simple]
            choices = iter(self._greedy_choices(torch.cat(parts)))
            for index, part in zip(simple, parts, strict=True):
                for there, state in zip(islice(choices, len(part)), _each(states[index], len(part)), strict=True):
                    self._append(drafts[index], there.tokens[0], there, state)
        for index in set(range(len(drafts))) - set(simple):
            for row, state in zip(logits[index], _each(states[index], len(logits[index])), strict=True):
                self._extend_by_sampling(drafts[index], row, state)

    def _greedy_choices(self, logits: Tensor) -> list[Choices]:
        values, columns = torch.log_softmax(logits.float(), dim=-1).topk(min(CHOICES, logits.shape[-1]), dim=-1)
        ids = self._token_ids[columns].tolist()
        chances = values.exp().tolist()
        return [Choices(*row) for row in zip(ids, chances, strict=True)]

    def _extend_by_sampling(self, draft: BlockDraft, logits: Tensor, state: Tensor | None) -> None:
        if draft.is_complete:
            return
        request = draft.want.open
        whole = logits.new_full((self._runner.vocabulary,), -torch.inf)
        whole[self._token_ids[: len(logits)]] = logits  # a recurrent head may choose among fewer
        generated = draft.generated if request.sampling.penalised else ()
        row = process(whole.unsqueeze(0), request.sampling, generated)[0]
        if draft.ratio:
            token, ids, weights = self._draw_by_ratio(draft, row)
            self._append(draft, token, _choices(row), state, ids, weights)
        else:
            token, choices = self._draw_coupled(draft, row)
            self._append(draft, token, choices, state)

    def _append(
        self,
        draft: BlockDraft,
        token: int,
        choices: Choices,
        state: Tensor | None,
        ids: tuple[int, ...] = (),
        weights: tuple[int, ...] = (),
    ) -> None:
        if draft.is_complete:
            return
        if draft.unverified is not None and len(draft.drafted) < len(draft.unverified):
            token = draft.unverified[len(draft.drafted)]  # whatever the model would rather have
        p_accepted = draft.p_accepted * choices.chances[0]
        if p_accepted < draft.least_chance:
            draft.is_cut = True
            return
        prefix_hash = extend_hash(draft.prefix_hash, token)
        by_head = draft.is_guessed
        draft.drafted.append(DraftedToken(token, choices, p_accepted, prefix_hash, ids, weights, by_head, state))
        draft.is_cut = p_accepted < draft.min_confidence

    def _draw_coupled(self, draft: BlockDraft, logits: Tensor) -> tuple[int, Choices]:
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
        at = key(draft.want.open.seed, draft.want.open.choice, draft.prefix_hash, Purpose.DRAFT)
        token = int(ids[gumbel_argmax(weights.double().log(), at)])
        padding = top_k - len(ids)
        return token, (*ids.tolist(), *[0] * padding), (*map(int, weights.tolist()), *[0] * padding)


def _hidden(output: ForwardOutput) -> Tensor:
    assert output.hidden is not None, "a draft head goes on from hidden states"
    return output.hidden


def _choices(logits: Tensor) -> Choices:
    """The likeliest tokens, likeliest first."""
    chances, ids = torch.softmax(logits, dim=-1).topk(min(CHOICES, logits.shape[-1]))
    return Choices(ids.tolist(), chances.tolist())


def _proposals(drafts: Sequence[BlockDraft]) -> list[Proposal]:
    """What there is to offer of blocks ahead, the likeliest outcomes first."""
    offered = [draft for draft in drafts if draft.drafted and not draft.is_root]
    return [draft.proposal() for draft in sorted(offered, key=lambda draft: -draft.chance)]


def _is_argmax(draft: BlockDraft) -> bool:
    """Whether its tokens are the likeliest ones."""
    sampling = draft.want.open.sampling
    return sampling.greedy and not sampling.penalised


def _each(states: Tensor | None, tokens: int) -> Iterable[Tensor | None]:
    """Of every token, (hidden,)."""
    return repeat(None, tokens) if states is None else states


def _sessions(wants: Sequence[Want]) -> set[str]:
    return {want.open.session for want in wants}
