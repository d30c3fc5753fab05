"""Prompt lookup: the continuation of the latest earlier occurrence of the text's own end.

Needs no model and no GPU (Saxena 2023). Its tokens are point masses: under ratio acceptance they stand with
their target probability.
"""

from collections.abc import Callable, Sequence

import numpy as np

from actors.methods.setup import DraftSetup
from cluster.config import DraftPool
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import Proposal, Want, max_block_len
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

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest

    def propose(self, wants: Sequence[Want], interrupted: Callable[[], bool], early: Early = dismiss) -> list[Proposal]:
        """Ahead at most one each: for the case that the text goes on as it did before."""
        found = [self._propose(want) if want.unverified is None else self._propose_ahead(want) for want in wants]
        return [proposal for proposal in found if proposal is not None]

    def close(self, sessions: Sequence[str]) -> None:
        """There is nothing to forget."""

    def _propose(self, want: Want) -> Proposal:
        return Proposal(
            want.open.session, len(want.tokens), want.prefix_hash, self._after(want.tokens, want.max_tokens)
        )

    def _propose_ahead(self, want: Want) -> Proposal | None:
        """A block after all of the block under verification and the token that the text has next.

        Where that is nothing: no block, for a target that goes on without waiting for one; else None.
        """
        block = want.unverified or ()
        outcome = (*block, *self._after((*want.tokens, *block), 1))
        base = (*want.tokens, *outcome)
        is_over = len(outcome) == len(block) or outcome[-1] in want.open.stop_ids
        room = 0 if is_over else min(want.max_tokens, max_block_len(want.open, len(base)))
        if room > 0 and (found := self._after(base, room)):
            prefix_hash = hashes_after(want.prefix_hash, outcome)[-1]
            return Proposal(want.open.session, len(base), prefix_hash, found, outcome=outcome)
        return None if block else Proposal(want.open.session, len(want.tokens), want.prefix_hash, ())

    def _after(self, tokens: tuple[int, ...], most: int) -> tuple[int, ...]:
        return look_up(tokens, most, self._longest, self._shortest)
