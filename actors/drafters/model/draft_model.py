"""Drafts with a small model, for all sessions in one batch, and ahead of verdicts.

While the target verifies a block, the model drafts for its likely outcomes, ranked by the model's own probabilities
(`cluster/drafting/lookahead.py`). A recurrent head (`HeadDrafting`) predicts further tokens between forwards or instead
of them, from the states of the latest forward over a block.

On a GPU, captured chains (`actors/engine/static_chain.py`) draft the requested blocks of a pass and choose their tokens
on the device, if all of them qualify (`DraftSampler.can_chain`): first the blocks, then the side branches of trees.

The weights can be exchanged while sessions are open. Only `DraftWeights` and the caches depend on them. An exchange
drops the caches, and later passes refill them.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from actors.attention.batch import never
from actors.drafters.model.draft_cache import CachedDraft, DraftCache, FedStates
from actors.drafters.model.forwards import ONE_AT_A_TIME, DraftForwards, MaskTokens, ReadDraft
from actors.drafters.model.recurrent_head import DraftHead
from actors.drafters.model.sampling import (
    CHOICE_INPUTS,
    MAX_BRANCH_TOKENS,
    OWN_NOISE,
    Calibration,
    DraftingLimits,
    DraftSampler,
    NoiseSource,
)
from actors.engine.runner import ChainRunner, InterruptibleRunner
from actors.engine.static_chain import MAX_TOKENS, StaticChain
from actors.sampling.logits_processors import PROCESSOR_FACTORIES, ProcessorFactory
from cluster.drafting.draft_state import DraftedToken
from cluster.drafting.lookahead import (
    MAX_OUTCOMES,
    MAX_SIBLINGS_READ,
    SIBLING_URGENCY,
    ForwardTime,
    draft_ahead,
    proposals,
)
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText
from cluster.drafting.trees import MAX_BRANCHES, Choices, threshold_of, worth_branching
from cluster.errors import ModelError
from protos.messages import DraftRequest, Open, Shape
from protos.prefix import hashes_after

log = logging.getLogger(__name__)

MAX_GUESSES = 16  # maximum blocks per pass whose first tokens the head predicts
GUESS_TOKENS = 2  # tokens that the head predicts per outcome


@dataclass(frozen=True, slots=True)
class _ReadStates:
    """Hidden states of a block under verification."""

    base_len: int  # tokens before the block
    states: dict[tuple[int, ...], Tensor]  # (hidden,) each, by the preceding tokens of the block


class HeadDrafting:
    """A recurrent head and the states from which it may continue."""

    def __init__(self, head: DraftHead, sampler: DraftSampler) -> None:
        self.width = head.width
        self._head = head
        self._sampler = sampler
        self._read: dict[str, _ReadStates] = {}  # by session: states of its latest block

    def extend_with_guesses(self, drafts: Sequence[CachedDraft], tokens: int, interrupted: Callable[[], bool]) -> None:
        """Adds up to `tokens` further tokens to each draft."""
        for _ in range(tokens):
            drafts = [draft for draft in drafts if not draft.is_complete]
            if not drafts or interrupted():
                return
            for draft in drafts:
                draft.is_guessed = True
            states, last_tokens = zip(*[draft.last for draft in drafts], strict=True)
            output = self._head.predict_next(torch.stack(states), last_tokens)
            assert output.hidden is not None, "the head returned no states"
            logits = torch.split(output.logits, 1)
            hidden = torch.split(output.hidden, 1)
            self._sampler.extend([ReadDraft(*each) for each in zip(drafts, logits, hidden, strict=True)])

    def preview(self, drafts: Sequence[CachedDraft], interrupted: Callable[[], bool]) -> None:
        """Predicts the first tokens of the likeliest blocks; forwards replace these tokens if time allows.

        Under rejection sampling, does nothing, because a prefix must always get the same continuation.
        """
        eligible = [draft for draft in drafts if draft.state is not None and not draft.sends_probs]
        likeliest = sorted(eligible, key=lambda draft: -draft.chance)[:MAX_GUESSES]
        self.extend_with_guesses(likeliest, GUESS_TOKENS, interrupted)

    def begin(self, drafts: Sequence[CachedDraft]) -> None:
        """Predicts the tokens after verdicts if the states that predicted the verdicts' last tokens are known.

        A forward would predict better, but takes several times as long, and the target may be waiting. If any session
        needs a forward, all sessions use one, because their blocks are sent together.
        """
        states = [self._state_before_last(draft) for draft in drafts]
        if any(state is None for state in states):
            return
        for draft, state in zip(drafts, states, strict=True):
            draft.state = state
        self.extend_with_guesses(drafts, GUESS_TOKENS, never)

    def store_predicted(self, roots: Sequence[CachedDraft]) -> None:
        """Stores the states of blocks under verification after their forward."""
        for root in roots:
            base_len = root.request.base_len
            session = root.request.session
            read = self._read.get(session)
            if read is None or read.base_len != base_len:
                read = self._read[session] = _ReadStates(base_len, {})
            for index, token in enumerate(root.drafted):
                if token.state is not None:
                    read.states[root.tokens[:index]] = token.state

    def close(self, session: str) -> None:
        self._read.pop(session, None)

    def _state_before_last(self, draft: CachedDraft) -> Tensor | None:
        """Returns the state, (hidden,), that predicted the last committed token; None if it is unknown or unusable."""
        tokens = draft.text.tokens
        read = self._read.pop(draft.request.session, None)
        if read is None or read.base_len >= len(tokens) or draft.sends_probs:
            return None
        return read.states.get(tuple(tokens[read.base_len : -1]))


MAX_REPEATED_TOKENS = 4  # maximum committed tokens fed again per sibling of the main path

_Considered = dict[int, list[DraftedToken]]
"""The model's candidates at the first positions of a block, by hash of the text before the block."""


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A loaded checkpoint; `DraftModel.exchange` replaces it.

    Column i of the runner's logits scores `token_ids[i]`; `head` may compute only the first columns.
    """

    runner: InterruptibleRunner
    token_ids: Tensor
    masks: MaskTokens = ONE_AT_A_TIME
    head: DraftHead | None = None
    max_positions: int | None = None  # see `DraftingLimits`

    @property
    def tokens_per_forward(self) -> int:
        return self.masks.width if self.head is None else self.head.width


LoadWeights = Callable[[Path], DraftWeights]
"""Loads a replacement checkpoint, which reuses the pages of the current one. Raises ModelError if it does not match."""


class DraftModel:
    """Drafts with a model on a `Runner`. Column i of its logits scores `token_ids[i]`.

    `head` may compute only the first columns. With `feed`, the model also reads the target's states. With `load`, its
    weights can be exchanged.
    """

    shapes = frozenset(Shape)

    def __init__(
        self,
        runner: InterruptibleRunner,
        token_ids: Tensor,
        cache: DraftCache,
        limits: DraftingLimits,
        clock: Callable[[], float] = time.monotonic,
        masks: MaskTokens = ONE_AT_A_TIME,
        head: DraftHead | None = None,
        calibration: Calibration | None = None,
        feed: FedStates | None = None,
        processor_factories: Sequence[
            ProcessorFactory
        ] = (),  # additional factories of logits processors, with inputs other than the Open
        load: LoadWeights | None = None,
        noise: NoiseSource = OWN_NOISE,
    ) -> None:
        self.needs = None if feed is None else feed.needs
        self._cache = cache
        self._limits = limits
        self._clock = clock
        self._feed = feed
        self._sampler = DraftSampler(
            token_ids,
            runner.vocabulary,
            limits,
            calibration or Calibration(),
            (*PROCESSOR_FACTORIES, *processor_factories),
            noise,
        )
        self._lookahead_time = ForwardTime()
        self._texts: dict[str, SessionText] = {}
        self._considered: dict[str, _Considered] = {}  # by session: candidates of its latest proposed blocks
        self._busy: set[str] = set()  # sessions of the current pass, whose pages are not evicted
        self._load = load
        self._captures_chains = True  # until a capture fails
        self._use(DraftWeights(runner, token_ids, masks, head, limits.max_positions))

    def _use(self, weights: DraftWeights) -> None:
        self._weights = weights
        self.tokens_per_forward = weights.tokens_per_forward
        self.outcomes = MAX_OUTCOMES if weights.head is None else MAX_GUESSES
        self._forwards = DraftForwards(
            weights.runner, self._cache, weights.masks, self._limits.pass_tokens, self._feed, weights.max_positions
        )
        self._head = None if weights.head is None else HeadDrafting(weights.head, self._sampler)
        self._chain: StaticChain | None = None
        is_plain = weights.head is None and self._feed is None and weights.masks.width == 1
        if self._captures_chains and is_plain and self._sampler.knows_noise and isinstance(weights.runner, ChainRunner):
            self._chain = weights.runner.static_chain(self._sampler.choose, CHOICE_INPUTS, len(weights.token_ids))

    def capture_chains(self, tokens: int, sessions: int) -> None:
        """Captures the chains of up to `sessions` blocks of up to `tokens` tokens, if any. Call this before serving.

        If a capture fails, blocks are drafted step by step.
        """
        if self._chain is None:
            return
        try:
            self._chain.capture_all(tokens, sessions)
        except RuntimeError as error:
            self._stop_chains(error)

    def _is_captured(self, chain: StaticChain, rows: int, tokens: int) -> bool:
        """Returns whether a chain is captured; first captures it if possible."""
        if self._captures_chains:
            try:
                chain.capture(rows, tokens)
            except RuntimeError as error:
                self._stop_chains(error)
        return self._captures_chains

    def _stop_chains(self, error: RuntimeError) -> None:
        log.warning("blocks are drafted without chains of steps, which is slower: a capture failed: %s", str(error))
        self._chain = None
        self._captures_chains = False

    # ------------------------------------------------------------ weights

    def prepare_weights(self, folder: Path) -> Callable[[], object]:
        if self._load is None:
            raise ModelError(f"{folder} cannot replace the draft in use, which consists of target layers; remove it")
        weights = self._load(folder)
        self._check(folder, weights)
        return partial(self.exchange, weights)

    def _check(self, folder: Path, weights: DraftWeights) -> None:
        """Raises ModelError unless the new weights have equal vocabulary size and tokens per forward."""
        used = self._weights
        for field, one, other in (
            ("vocabulary rows", weights.runner.vocabulary, used.runner.vocabulary),
            ("tokens per forward", weights.tokens_per_forward, used.tokens_per_forward),
        ):
            if one != other:
                raise ModelError(
                    f"{folder} cannot replace the draft in use: it has {one} {field}, not {other}; train it from that"
                    " draft, and keep the other files of its folder"
                )

    def exchange(self, weights: DraftWeights) -> DraftWeights:
        """Replaces the weights between two passes; returns the previous weights.

        Keeps texts, grammar states, calibration fits and the target's states, whose projection must not change. Drops
        all results of the previous weights, so that no block mixes both. The next passes read each session's text
        again, within the limits of a pass.
        """
        used = self._weights
        self._cache.clear()
        self._considered.clear()
        self._sampler.exchange(weights.token_ids)
        self._use(weights)
        return used

    # ------------------------------------------------------------ sessions

    def open(self, request: Open) -> None:
        self._texts[request.session] = SessionText.begin(request)
        if self._feed is not None:
            self._feed.open(request.session)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._texts[session].tokens.extend(tokens)
        self._sampler.committed(session, self._texts[session].tokens)

    def rewrite(self, session: str, length: int, tokens: Sequence[int]) -> None:
        """Replaces a session's tokens after the first `length`; the cache follows with the next block."""
        text = self._texts[session]
        if length < len(text.tokens):
            del text.tokens[length:]
            self._forget_predictions(session)
        self.committed(session, tokens)

    def begin(self, session: str, first: int) -> None:
        """Sets the first position of an open session's states; 0 by default."""
        assert self._feed is not None, "a method that needs no states is sent none"
        self._feed.begin(session, first)

    def states(self, session: str, first: int, rows: Tensor) -> None:
        """Receives the target's states, (n, width) as in `needs`, at positions `first` and up.

        A session gets no block while required states are missing.
        """
        assert self._feed is not None, "a method that needs no states is sent none"
        self._feed.put(session, first, rows)

    def close(self, sessions: Sequence[str]) -> None:
        if self._feed is not None:
            self._feed.close(sessions)
        for name in sessions:
            self._texts.pop(name, None)
            self._cache.close(name)
            self._forget_predictions(name)
        if self._cache.is_idle:
            self._cache.check()

    def _forget_predictions(self, session: str) -> None:
        self._considered.pop(session, None)
        self._sampler.close(session)
        if self._head is not None:
            self._head.close(session)

    @property
    def is_idle(self) -> bool:
        return self._cache.is_idle

    # ------------------------------------------------------------ blocks

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._busy = _sessions(requests)
        drafts = [self._begin(request, (), request.max_tokens) for request in requests]
        for draft in drafts:
            draft.min_confidence = 0.0 if draft.sends_probs else self._limits.min_confidence
        if self._head is not None:
            self._head.begin(drafts)
        active = [draft for draft in drafts if not draft.drafted]
        chain = self._chain
        if chain is not None and self._sampler.can_chain(active):
            self._complete_by_chains(chain, active)
            branches = [branch for draft in active for branch in self._branch_off(draft, most=draft.max_tokens)]
            self._complete_by_chains(chain, branches)
        else:
            self._complete_by_forwards(active)
        if self._head is not None:
            self._head.extend_with_guesses(
                [branch for draft in drafts for branch in self._branch_off(draft)], MAX_BRANCH_TOKENS, never
            )
        for draft in drafts:
            self._cache.publish(draft.branch, draft.request.base_len)
            self._considered[draft.request.session] = {draft.base_hash: draft.by_model}
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        self._busy = _sessions(requests)
        guesses = draft_ahead(self, requests, self._lookahead_time, self._clock, interrupted, early)
        self._considered |= {request.session: {} for request in requests}
        for draft in guesses:
            self._considered[draft.request.session][draft.base_hash] = draft.by_model
        return proposals(guesses)

    def _begin(
        self, request: DraftRequest | LookaheadRequest, unverified: tuple[int, ...], max_tokens: int
    ) -> CachedDraft:
        """Starts a block after the committed text, or a root that also reads `unverified`."""
        text = self._texts[request.session]
        tokens = [*text.tokens, *unverified]
        first = 0 if self._feed is None else self._feed.first_of(request.session)
        branch = self._cache.resume(request.session, tokens, first, text.open.cache_salt)
        if self._feed is not None:
            self._feed.rewind(self._cache, branch)
        return CachedDraft(
            request=request,
            text=text,
            base_hash=request.prefix_hash,
            max_tokens=max_tokens,
            branch=branch,
            pending=tokens[len(branch.tokens) :],
        )

    def _branch_off(self, block: CachedDraft, most: int = MAX_BRANCHES) -> list[CachedDraft]:
        """Starts up to `most` side branches with alternatives to the block's tokens.

        With a head, side branches need no forward; otherwise, the block's next forward includes them.
        """
        if not block.takes_trees or not block.drafted:
            return []
        stems = [branch.stem for branch in block.branches]
        paths = block.paths
        least = max(block.least_chance, threshold_of(paths, block.max_tokens))
        branches = [
            self._new_branch(block, stem, chance)
            for stem, chance in worth_branching(paths, block.tokens, least, most)
            if stem not in stems and len(stem) < block.max_tokens
        ]
        block.branches += branches
        return branches

    def _new_branch(self, block: CachedDraft, stem: tuple[int, ...], chance: float) -> CachedDraft:
        """Creates a side branch after `stem`: tokens of the block, then an alternative to its next token."""
        cached = min(len(block.branch.tokens), block.base_len + len(stem) - 1)
        return CachedDraft(
            request=block.request,
            text=block.text,
            base_hash=hashes_after(block.base_hash, stem)[-1],
            max_tokens=min(MAX_BRANCH_TOKENS, block.max_tokens - len(stem)),
            branch=block.branch if self._head is not None else self._cache.fork(block.branch, cached),
            pending=[*block.text.tokens, *stem][cached:],
            outcome=stem,
            chance=chance,
            stem=stem,
            state=block.drafted[len(stem) - 1].state,
        )

    # ------------------------------------------------------------ blocks ahead of a verdict

    def roots(self, request: LookaheadRequest) -> list[CachedDraft]:
        """Returns roots for the main path, from its first unknown candidates on, and for its siblings.

        The model first reads the part of the block drafted by a head or another method. If the preceding text is fed
        again with true states, it reads the whole block, because the candidates change.
        """
        block = request.unverified.main_path
        considered = self._considered.get(request.session, {}).get(request.prefix_hash, [])
        root = self._begin(request, block, len(block) + 1)
        root.unverified = block
        root.recall(considered if len(root.branch.tokens) >= request.base_len else [])
        while root.missing > len(root.pending):  # the pending tokens are already cached
            token = block[len(root.drafted)]
            root.drafted.append(DraftedToken(token, Choices((token,), (1.0,)), root.p_accepted))
            root.settled = len(root.drafted)
        root.logits = root.missing
        root.needs_read_for_choices = root.logits > 1
        return [root, *self._siblings_of(root)]

    def _siblings_of(self, root: CachedDraft) -> list[CachedDraft]:
        """Creates roots for the first tokens under verification off the main path."""
        request = root.lookahead
        # With a shorter cache, each root would read the prompt again.
        first = request.base_len - MAX_REPEATED_TOKENS
        beside = [path for path in request.unverified.off_main_path if len(root.branch.tokens) >= first]
        return [self._sibling(root, path) for path in beside[:MAX_SIBLINGS_READ]]

    def _sibling(self, root: CachedDraft, path: tuple[int, ...]) -> CachedDraft:
        request = root.lookahead
        tokens = [*root.text.tokens, *path]
        cached = min(len(root.branch.tokens), len(tokens) - 1)
        sibling = CachedDraft(
            request=request,
            text=root.text,
            base_hash=request.prefix_hash,
            max_tokens=len(path) + 1,
            branch=self._cache.fork(root.branch, cached),
            pending=tokens[cached:],
            unverified=path,
            main=root,
            chance=SIBLING_URGENCY,
            settled=len(path),
        )
        sibling.drafted = [DraftedToken(token, Choices((token,), (1.0,)), 1.0) for token in path]
        return sibling

    def fork(self, root: CachedDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> CachedDraft | None:
        cached = root.request.base_len + len(outcome) - 1
        if cached > len(root.branch.tokens):
            return None
        return CachedDraft(
            request=root.request,
            text=root.text,
            base_hash=hashes_after(root.request.prefix_hash, outcome)[-1],
            max_tokens=max_tokens,
            branch=self._cache.fork(root.branch, cached),
            pending=[outcome[-1]],
            outcome=outcome,
            chance=chance,
            state=root.drafted[len(outcome) - 1].state,
        )

    def preview(self, drafts: Sequence[CachedDraft], interrupted: Callable[[], bool]) -> None:
        if self._head is not None:
            self._head.preview(drafts, interrupted)

    def extend(self, drafts: Sequence[CachedDraft], interrupted: Callable[[], bool]) -> list[CachedDraft]:
        return self._add_tokens(self._forwards.read(drafts, self._busy, interrupted), interrupted)

    def _complete_by_forwards(self, active: Sequence[CachedDraft]) -> None:
        """Adds one token per forward to all blocks and their side branches."""
        branches: list[CachedDraft] = []
        while active:
            advanced = self.extend([*active, *branches], never)
            active = [draft for draft in advanced if not draft.stem and not draft.is_complete]
            branches = [draft for draft in advanced if draft.stem and not draft.is_complete]
            if self._head is None:
                branches += [branch for draft in active for branch in self._branch_off(draft)]

    def _complete_by_chains(self, chain: StaticChain, drafts: Sequence[CachedDraft]) -> None:
        """Adds several tokens per chain to blocks, or to side branches."""
        for first in range(0, len(drafts), chain.max_rows):
            active = list(drafts[first : first + chain.max_rows])
            while active:
                active = self._extend_by_chains(chain, active)

    def _extend_by_chains(self, chain: StaticChain, drafts: Sequence[CachedDraft]) -> list[CachedDraft]:
        """Extends blocks by up to MAX_TOKENS tokens each, or by one if the pool is full; returns incomplete blocks.

        The first forward reads all pending tokens. The host waits for the device once, at the end of the chain.
        """
        read = self._forwards.read(drafts, self._busy, never)
        if not read:
            return []
        advanced = [each.draft for each in read]
        tokens = min(MAX_TOKENS, max(draft.missing for draft in advanced))
        is_captured = self._is_captured(chain, len(advanced), tokens)
        rows = self._forwards.reserve_chains(advanced, tokens, self._busy) if is_captured else None
        if rows is None:
            return [draft for draft in self._add_tokens(read, never) if not draft.is_complete]
        logits = torch.cat([each.logits for each in read])
        values = chain.run(rows, logits, self._sampler.choice_inputs(advanced, tokens))
        self._sampler.extend_by_chains(advanced, [len(row.tokens) + 1 for row in rows], values)
        self._forwards.settle_chains(advanced, rows)
        for draft in advanced:
            draft.settle()
        return [draft for draft in advanced if not draft.is_complete]

    def _add_tokens(self, read: Sequence[ReadDraft], interrupted: Callable[[], bool]) -> list[CachedDraft]:
        """Adds the tokens predicted by a forward; returns its blocks."""
        advanced = [each.draft for each in read]
        for draft in advanced:
            draft.forget_guesses()
        self._sampler.extend(read)
        for draft in advanced:
            draft.settle()
        if self._head is not None and advanced:
            self._head.extend_with_guesses(advanced, self._head.width - 1, interrupted)
            self._head.store_predicted([draft for draft in advanced if draft.is_root])
        for draft in advanced:
            if not draft.is_complete:
                draft.settle()
        return advanced


def _sessions(requests: Iterable[DraftRequest | LookaheadRequest]) -> set[str]:
    return {request.session for request in requests}
