"""How long a drafter's passes take: shape from a profile at start, scale from the passes themselves.

A profile is made while nobody verifies; a target on the same machine, and whatever serves answers, slow drafting down.
Pure arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.costs import DraftCost
from cluster.pacing.smoothing import Mean
from cluster.pacing.step_cost import pace_after


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """What is known of the passes of one drafter."""

    profile: DraftCost
    pace: Mean = Mean()  # of late, as times the profile
    read: frozenset[str] = frozenset()  # sessions whose prompts were fed in a pass before

    def after(self, sessions: Sequence[str], tokens: int, seconds: float) -> "DraftTiming":
        """A pass for these sessions, the longest block of `tokens`; one that fed a prompt says nothing of drafting."""
        expected_s = self.profile.seconds(len(sessions), tokens)
        known = self.read.issuperset(sessions)
        pace = pace_after(self.pace, seconds / expected_s) if known and tokens and expected_s else self.pace
        return replace(self, pace=pace, read=self.read | frozenset(sessions))

    def without(self, sessions: Sequence[str]) -> "DraftTiming":
        """These sessions have ended."""
        return replace(self, read=self.read - frozenset(sessions))

    @property
    def cost(self) -> DraftCost:
        """What passes cost by now."""
        return self.profile.times(self.pace.value) if self.pace.count else self.profile
