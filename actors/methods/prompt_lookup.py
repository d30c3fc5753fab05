"""Prompt lookup: the continuation of the latest earlier occurrence of the text's own end.

Needs no model and no GPU (Saxena 2023). Its tokens are point masses: under ratio acceptance they stand with
their target probability.
"""

from collections.abc import Callable, Sequence

import numpy as np

from actors.methods import Early, TargetNeeds, dismiss
from cluster.wants import Proposal, Want
from protos.messages import Verdict

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


class PromptLookup:
    """The method around `look_up`; holds no state."""

    needs = TargetNeeds()
    tokens_per_forward = 1

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest

    def propose(self, wants: Sequence[Want], interrupted: Callable[[], bool], early: Early = dismiss) -> list[Proposal]:
        """Nothing ahead: a lookup takes no time once the verdict is in."""
        return [self._propose(want) for want in wants if want.unverified is None]

    def observe(self, verdict: Verdict) -> None:
        """Everything it needs comes with the next want."""

    def close(self, sessions: Sequence[str]) -> None:
        """There is nothing to forget."""

    def _propose(self, want: Want) -> Proposal:
        found = look_up(want.tokens, want.max_tokens, self._longest, self._shortest)
        return Proposal(want.open.session, len(want.tokens), want.prefix_hash, found)
