"""Prompt lookup: the continuation of the latest earlier occurrence of the text's own end.

Needs no model and no GPU (Saxena 2023). Its tokens are point masses: under ratio acceptance they stand with
their target probability.
"""

from collections.abc import Sequence

from actors.methods import TargetNeeds
from cluster.drafting import Proposal, Want
from protos.messages import Verdict


def look_up(tokens: Sequence[int], max_tokens: int, longest: int, shortest: int) -> tuple[int, ...]:
    """What followed the latest earlier occurrence of the longest suffix of `longest` to `shortest` tokens."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = list(tokens[-size:])
        for start in range(len(tokens) - size - 1, -1, -1):
            if list(tokens[start : start + size]) == suffix:
                return tuple(tokens[start + size : start + size + max_tokens])
    return ()


class PromptLookup:
    """The method around `look_up`; holds no state."""

    needs = TargetNeeds()

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest

    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        return [self._propose(want) for want in wants]

    def observe(self, verdict: Verdict) -> None:
        """Everything it needs comes with the next want."""

    def close(self, sessions: Sequence[str]) -> None:
        """There is nothing to forget."""

    def _propose(self, want: Want) -> Proposal:
        found = look_up(want.tokens, want.max_tokens, self._longest, self._shortest)
        return Proposal(want.open.session, len(want.tokens), want.prefix_hash, found, ahead=want.ahead)
