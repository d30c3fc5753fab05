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
from cluster.drafting.forward_time import ForwardTime
from cluster.drafting.method import Early, dismiss
from cluster.drafting.outcomes import Choices
from cluster.drafting.requests import Proposal, Want
from protos.draft_tree import NO_TREE
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
    """The method around `look_up`; holds no state."""

    tokens_per_forward = 1
    outcomes = 1  # the text goes on as it did before

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest

    def propose(self, wants: Sequence[Want], interrupted: Callable[[], bool], early: Early = dismiss) -> list[Proposal]:
        sure = [want for want in wants if want.unverified is None]
        ahead = [want for want in wants if want.unverified is not None]
        return [self._propose(want) for want in sure] + (self._propose_ahead(ahead) if ahead else [])

    def close(self, sessions: Sequence[str]) -> None:
        """There is nothing to forget."""

    def _propose(self, want: Want) -> Proposal:
        draft = BlockDraft(want=want, base_hash=want.prefix_hash, max_tokens=want.max_tokens)
        self.extend([draft])
        return draft.proposal()

    def _propose_ahead(self, wants: Sequence[Want]) -> list[Proposal]:
        """Takes no time that counts, so nothing ends it. A target that goes on without a block is told of none."""
        drafts = draft_ahead(self, wants, ForwardTime(), clock=lambda: 0.0, interrupted=lambda: False, early=dismiss)
        found = proposals(drafts)
        served = {proposal.session for proposal in found}
        waiting = [want for want in wants if not len(want.unverified or NO_TREE) and want.open.session not in served]
        return found + [Proposal(want.open.session, len(want.tokens), want.prefix_hash, NO_TREE) for want in waiting]

    # ------------------------------------------------------------ what the search ahead goes by

    def roots(self, want: Want) -> list[BlockDraft]:
        """All of the block is expected to be accepted."""
        block = (want.unverified or NO_TREE).trunk
        root = BlockDraft(want=want, base_hash=want.prefix_hash, max_tokens=len(block) + 1, unverified=block)
        for token in block:
            root.append(token, _sure(token))
        root.settle()
        return [root]

    def fork(self, root: BlockDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> BlockDraft:
        base_hash = hashes_after(root.want.prefix_hash, outcome)[-1]
        return BlockDraft(want=root.want, base_hash=base_hash, max_tokens=max_tokens, outcome=outcome, chance=chance)

    def preview(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None:
        """A lookup is as quick as any preview."""

    def extend(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool] = lambda: False) -> list[BlockDraft]:
        """As far as the text goes on: those that it has more tokens for."""
        return [draft for draft in drafts if self._extend(draft)]

    def _extend(self, draft: BlockDraft) -> bool:
        text = (*draft.want.tokens, *draft.outcome, *draft.tokens)
        found = look_up(text, draft.missing, self._longest, self._shortest)
        for token in found:
            draft.append(token, _sure(token))
        draft.settle()
        draft.is_cut = True
        return bool(found)


def _sure(token: int) -> Choices:
    """The text knows no other."""
    return Choices((token,), (1.0,))
