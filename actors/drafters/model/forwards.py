"""Runs a draft model's forwards over the pending tokens of several blocks, within token budget and cache.

Two options of a checkpoint make forwards cheaper:

* Mask tokens predict several tokens in one forward (PARD: An et al. 2025, arXiv 2504.18583). A mask attends to the text
  and to earlier masks, but not to the tokens predicted there, so later predictions are somewhat worse than with
  separate forwards. Keys and values of masks are discarded after the forward.
* A smaller LM head covers only the token ids in `frequent_tokens.json` of the draft folder, most frequent first
  (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). In a small model, the LM head over a large vocabulary dominates the
  cost of a forward. The target still verifies over the full vocabulary, so results stay exact, and the acceptance rate
  falls only slightly.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from actors.attention.batch import Interrupted
from actors.compute.kv_cache import InputRow
from actors.drafters.model.draft_cache import CachedDraft, DraftCache, FedStates
from actors.engine.runner import InterruptibleRunner
from cluster.errors import ModelError
from cluster.page_allocator import PageCopy

MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")  # keys in config.json; publishers differ
WIDTH_KEY = "tokens_per_forward"


@dataclass(frozen=True, slots=True)
class MaskTokens:
    """Mask token of a model that predicts `width` tokens per forward, of which `width` - 1 are at masks."""

    token: int
    width: int

    def after(self, tokens: int) -> tuple[int, ...]:
        """Returns the masks to feed after the last token to predict `tokens` tokens."""
        return (self.token,) * (min(self.width, tokens) - 1)


ONE_AT_A_TIME = MaskTokens(token=0, width=1)


def read_mask_tokens(config: PretrainedConfig, longest: int) -> MaskTokens:
    """Reads the checkpoint's mask token. Raises ModelError if its id is out of range."""
    token = next((value for key in MASK_KEYS if (value := getattr(config, key, None)) is not None), None)
    if token is None:
        return ONE_AT_A_TIME
    rows = int(config.get_text_config().vocab_size)
    if not isinstance(token, int) or not 0 <= token < rows:
        raise ModelError(f"the draft model's mask token is {token!r}, expected an id from 0 to {rows - 1}; correct it")
    return MaskTokens(token, tokens_per_forward(config, longest))


def tokens_per_forward(config: PretrainedConfig, longest: int) -> int:
    """Returns the number of tokens per forward in the checkpoint's training; `longest` by default.

    Raises ModelError if the number in the configuration is invalid.
    """
    width = getattr(config, WIDTH_KEY, longest)
    if not isinstance(width, int) or width < 1:
        raise ModelError(f"the draft model's {WIDTH_KEY} is {width!r}, expected 1 or more; correct config.json")
    return width


FILE = "frequent_tokens.json"


def read_frequent_tokens(folder: Path, vocabulary: int) -> list[int] | None:
    """Reads the frequent token ids of a folder; None without a file. Raises ModelError if ids are invalid."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 0 <= i < vocabulary for i in ids):
        raise ModelError(f"{path} must be a list of token ids from 0 to {vocabulary - 1}; correct it")
    return ids


def reduce_head(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Reduces the LM head to the rows `token_ids`; column i of the logits then scores `token_ids[i]`.

    Does not reduce the input embedding, since any token may be fed.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"a draft needs a linear head to be reduced, not {type(head).__name__}; remove {FILE}")
    reduced = nn.Linear(head.in_features, len(token_ids), bias=head.bias is not None, device="meta")
    reduced.weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
    if head.bias is not None:
        reduced.bias = nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
    model.set_output_embeddings(reduced)


class ReadDraft(NamedTuple):
    """A block without pending tokens, and the model's output at its last tokens."""

    draft: CachedDraft
    logits: Tensor  # (positions, columns)
    hidden: Tensor | None  # (positions, hidden)


class _Fed(NamedTuple):
    draft: CachedDraft
    row: InputRow
    cached: int  # branch length before this forward
    rest: list[int]  # tokens left pending


class DraftForwards:
    """Feeds a draft model through its cache; `states` supplies the hidden states for a draft head.

    A forward feeds at most `pass_tokens` tokens, all at positions below `max_positions`.
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
        """Runs one forward for all drafts; returns the drafts without pending tokens.

        Tokens stay pending if they exceed the budget, if the pool is full, or if they need an unknown state. If pages
        are needed, sessions outside `busy` are evicted.
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
        read = [ReadDraft(each.draft, rows, states) for each, rows, states in zipped if not each.rest]
        if self._states is not None:
            for draft, _, predicted in read:
                assert predicted is not None, "the head returned no states"
                self._states.store_predicted(draft.branch, predicted[: draft.logits])  # excludes outputs of masks
        return read

    def reserve_chains(self, drafts: Sequence[CachedDraft], tokens: int, busy: set[str]) -> list[InputRow] | None:
        """Reserves the positions of chains of up to `tokens` tokens for drafts without pending tokens.

        A chain feeds all its tokens but the last. Returns the rows that it feeds; None if the drafts do not fit in a
        forward or in the pool.
        """
        if len(drafts) > self._pass_tokens:
            return None
        rows: list[InputRow] = []
        for draft in drafts:
            count = min(tokens, draft.missing, self._max_positions - len(draft.branch.tokens) + 1) - 1
            row = self._cache.reserve(draft.branch, max(0, count), busy)
            if row is None:
                for reserved in drafts[: len(rows)]:
                    self._cache.append(reserved.branch, ())
                return None
            rows.append(row)
        return rows

    def settle_chains(self, drafts: Sequence[CachedDraft], rows: Sequence[InputRow]) -> None:
        """Adds the drafted tokens that chains have fed to the cache."""
        for draft, row in zip(drafts, rows, strict=True):
            self._cache.append(draft.branch, draft.tokens[draft.settled :][: len(row.tokens)])

    def _feed(self, drafts: Sequence[CachedDraft], busy: set[str], copies: list[PageCopy]) -> list[_Fed]:
        """Builds the rows of the next forward, shortest first; appends the preceding page copies to `copies`."""
        fed: list[_Fed] = []
        budget = self._pass_tokens
        for draft in sorted(drafts, key=lambda draft: len(draft.pending)):
            part = self._tokens_to_feed(draft, draft.pending[:budget])
            rest = draft.pending[len(part) :]
            cached = len(draft.branch.tokens)
            room = min(budget, self._max_positions - cached) - len(part)
            masks = () if rest or draft.is_root else self._masks.after(draft.missing)[:room]
            logits = 1 if rest else draft.logits
            if part and (feed := self._cache.feed(draft.branch, part, busy, masks, logits)) is not None:
                row, copied = feed
                if self._states is not None:
                    row = replace(row, states=self._states.states(draft.branch, cached, len(masks)))
                fed.append(_Fed(draft, row, cached, rest))
                copies += copied
                draft.pending = rest
                budget = budget - len(part) - len(masks)
        return fed

    def _tokens_to_feed(self, draft: CachedDraft, part: list[int]) -> list[int]:
        """Returns the feedable leading tokens of `part`; empty if the text exceeds the model's positions."""
        if len(draft.branch.tokens) + len(draft.pending) > self._max_positions:
            return []
        return part if self._states is None else part[: self._states.count_feedable(draft, len(part))]
