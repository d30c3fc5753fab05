"""Forwards of a draft model: batches the pending tokens of several blocks, within budget and cache."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from actors.attention.batch import Interrupted
from actors.compute.kv_cache import FeedRow
from actors.drafters.model.cached_draft import CachedDraft
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.pard import MaskTokens
from actors.drafters.model.state_feed import FedStates
from actors.engine.runner import InterruptibleRunner
from cluster.page_allocator import PageCopy


class ReadDraft(NamedTuple):
    """A block whose pending tokens were all fed, with the model's output after the last ones of them."""

    draft: CachedDraft
    logits: Tensor  # (places, columns)
    hidden: Tensor | None  # (places, hidden)


class _Fed(NamedTuple):
    draft: CachedDraft
    row: FeedRow
    cached: int  # branch length before this forward
    rest: list[int]  # pending tokens that were not fed


class DraftForwards:
    """Feeds a draft model through its cache; a draft head also gets the hidden states from `states`.

    A forward feeds at most `pass_tokens` tokens, and no token at position `max_positions` or later.
    """

    def __init__(
        self,
        runner: InterruptibleRunner,
        cache: DraftCache,
        masks: MaskTokens,
        pass_tokens: int,
        states: FedStates | None = None,
        max_positions: int | None = None,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._masks = masks
        self._pass_tokens = pass_tokens
        self._max_positions = sys.maxsize if max_positions is None else max_positions
        self._states = states

    def read(self, drafts: Sequence[CachedDraft], busy: set[str], interrupted: Callable[[], bool]) -> list[ReadDraft]:
        """Runs one forward for all drafts; returns those whose pending tokens were all fed.

        Tokens that exceed the budget, find no room in the pool or need an unknown state are not fed; the next call
        continues there. Sessions that are not `busy` are evicted to make room.
        """
        copies: list[PageCopy] = []
        fed = self._feed(drafts, busy, copies)
        if not fed:
            return []
        rows = [each.row for each in fed]
        try:
            output = self._runner.forward(rows, copies, interrupted)
        except Interrupted:
            for each in fed:
                self._cache.cut(each.draft.branch, each.cached)
            return []
        for draft, row, _, _ in fed:
            if not draft.is_root and row.logits > 1:
                self._cache.drop_masks(draft.branch)
        sizes = [row.logits for row in rows]
        logits = torch.split(output.logits, sizes)
        hidden = [None] * len(fed) if output.hidden is None else torch.split(output.hidden, sizes)
        zipped = zip(fed, logits, hidden, strict=True)
        read = [ReadDraft(each.draft, said, made_of) for each, said, made_of in zipped if not each.rest]
        if self._states is not None:
            for draft, _, predicted in read:
                assert predicted is not None, "a head that is fed states predicts some"
                self._states.remember(draft.branch, predicted[: draft.logits])  # outputs at mask tokens are not states
        return read

    def _feed(self, drafts: Sequence[CachedDraft], busy: set[str], copies: list[PageCopy]) -> list[_Fed]:
        """Builds the rows of the next forward, shortest first; adds to `copies` the page copies to make before it."""
        fed: list[_Fed] = []
        budget = self._pass_tokens
        for draft in sorted(drafts, key=lambda draft: len(draft.pending)):
            part = self._feedable(draft, draft.pending[:budget])
            rest = draft.pending[len(part) :]
            cached = len(draft.branch.tokens)
            room = min(budget, self._max_positions - cached) - len(part)
            masks = () if rest or draft.is_root else self._masks.after(draft.missing)[:room]
            wanted = 1 if rest else draft.logits
            if part and (feed := self._cache.feed(draft.branch, part, busy, masks, wanted)) is not None:
                row, copied = feed
                if self._states is not None:
                    row = replace(row, states=self._states.states(draft.branch, cached, len(masks)))
                fed.append(_Fed(draft, row, cached, rest))
                copies += copied
                draft.pending = rest
                budget = budget - len(part) - len(masks)
        return fed

    def _feedable(self, draft: CachedDraft, part: list[int]) -> list[int]:
        """Returns the part of `part` that can be fed now; empty if the text exceeds the model's positions."""
        if len(draft.branch.tokens) + len(draft.pending) > self._max_positions:
            return []
        return part if self._states is None else part[: self._states.feedable(draft, len(part))]
