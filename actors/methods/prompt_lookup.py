"""Prompt lookup: the continuation of the latest earlier occurrence of the text's own end.

Needs no model and no GPU (Saxena 2023). Its tokens are point masses: under ratio acceptance they stand with
their target probability.
"""

from collections.abc import Callable, Sequence

import numpy as np

from actors.methods.setup import DraftSetup
from cluster.config import DraftPool
from cluster.drafting.ahead import draft_ahead, proposals
from cluster.drafting.block_draft import BlockDraft
from cluster.drafting.method import Early, dismiss
from cluster.drafting.outcomes import Choices
from cluster.drafting.requests import AheadRequest, Proposal
from cluster.drafting.session_texts import SessionTexts
from cluster.drafting.timing.forward_time import ForwardTime
from protos.draft_tree import NO_TREE
from protos.messages import DraftRequest, Open, Shape
from protos.prefix import hashes_after

TOKEN_BYTES = 4


def look_up(tokens: Sequence[int], max_tokens: int, longest: int, shortest: int) -> tuple[int, ...]:
    """What followed the latest earlier occurrence of the longest suffix of `longest` to `shortest` tokens."""
    text = np.asarray(tokens, dtype="<i4").tobytes()  # searched as bytes: contexts are long, and this is every round
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        end = _latest(text, text[-TOKEN_BYTES * size :])
        if end is not None:
            return tuple(tokens[end : end + max_tokens])
    return ()


def _latest(text: bytes, suffix: bytes) -> int | None:
    """Index of the token after the latest occurrence of `suffix` that ends before the text does."""
    before = len(text) - 1
    while (start := text.rfind(suffix, 0, before)) >= 0:
        if start % TOKEN_BYTES == 0:
            return (start + len(suffix)) // TOKEN_BYTES
        before = start + len(suffix) - 1  # the bytes of two neighbours look alike: no occurrence
    return None


def create(draft: DraftPool, setup: DraftSetup) -> "PromptLookup":
    options = draft.prompt_lookup
    return PromptLookup(options.max_ngram, options.min_ngram)


class PromptLookup:
    """The method around `look_up`."""

    shapes = frozenset({Shape.CHAIN})
    tokens_per_forward = 1
    outcomes = 1  # the text goes on as it did before

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._texts = SessionTexts()

    def open(self, request: Open) -> None:
        self._texts.open(request)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._texts.committed(session, tokens)

    def close(self, sessions: Sequence[str]) -> None:
        self._texts.close(sessions)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [self._begin(request, request.max_tokens) for request in requests]
        self.extend(drafts)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Takes no time that counts, so nothing ends it. A target that goes on without a block is told of none."""
        drafts = draft_ahead(self, requests, ForwardTime(), clock=lambda: 0.0, interrupted=lambda: False, early=dismiss)
        found = proposals(drafts)
        served = {proposal.session for proposal in found}
        waiting = [each for each in requests if not len(each.unverified) and each.session not in served]
        return found + [Proposal(each.session, each.base_len, each.prefix_hash, NO_TREE) for each in waiting]

    def _begin(self, request: DraftRequest | AheadRequest, max_tokens: int) -> BlockDraft:
        text = self._texts[request.session]
        return BlockDraft(request=request, text=text, base_hash=request.prefix_hash, max_tokens=max_tokens)

    # ------------------------------------------------------------ what the search ahead goes by

    def roots(self, request: AheadRequest) -> list[BlockDraft]:
        """All of the block is expected to be accepted."""
        block = request.unverified.trunk
        root = self._begin(request, len(block) + 1)
        root.unverified = block
        for token in block:
            root.append(token, _sure(token))
        root.settle()
        return [root]

    def fork(self, root: BlockDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> BlockDraft:
        return BlockDraft(
            request=root.request,
            text=root.text,
            base_hash=hashes_after(root.request.prefix_hash, outcome)[-1],
            max_tokens=max_tokens,
            outcome=outcome,
            chance=chance,
        )

    def preview(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None:
        """A lookup is as quick as any preview."""

    def extend(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool] = lambda: False) -> list[BlockDraft]:
        """As far as the text goes on: those that it has more tokens for."""
        return [draft for draft in drafts if self._extend(draft)]

    def _extend(self, draft: BlockDraft) -> bool:
        text = (*draft.text.tokens, *draft.outcome, *draft.tokens)
        found = look_up(text, draft.missing, self._longest, self._shortest)
        for token in found:
            draft.append(token, _sure(token))
        draft.settle()
        draft.is_cut = True
        return bool(found)


def _sure(token: int) -> Choices:
    """The text knows no other."""
    return Choices((token,), (1.0,))
