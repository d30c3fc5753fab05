"""Drafting methods: how a drafter finds candidate tokens.

One small interface; each method is a module of its own. Knows nothing of streams or verification.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.drafting import Proposal, Want
from protos.messages import Verdict


@dataclass(frozen=True, slots=True)
class TargetNeeds:
    """What a method needs from the target beside tokens."""

    hidden_layers: tuple[int, ...] = ()  # whose hidden states verdicts must carry


class DraftingMethod(Protocol):
    """Called from one thread, one call at a time."""

    needs: TargetNeeds

    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        """One proposal per want, in order.

        Under ratio acceptance a token may depend on nothing but its prefix and the want's seed, and the length
        is fixed before the first token is drawn.
        """
        ...

    def observe(self, verdict: Verdict) -> None:
        """What the target decided, for methods that learn from it or need its hidden states."""
        ...

    def close(self, sessions: Sequence[str]) -> None:
        """Forgets sessions; unknown ones are ignored."""
        ...
