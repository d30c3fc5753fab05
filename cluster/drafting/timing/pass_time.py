"""Duration of a drafter's passes: the shape from a startup profile, the scale from the passes themselves.

The profile is measured while no target verifies. A target on the same machine and the processes that serve answers slow
drafting down. Pure arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.costs import DraftCost
from cluster.speculation.cost_model import pace_after
from cluster.speculation.ewma import Mean


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """Measured timing of one drafter's passes."""

    profile: DraftCost
    pace: Mean = Mean()  # recent pass times, as a multiple of the profile
    read: frozenset[str] = frozenset()  # sessions whose prompts were fed in an earlier pass

    def after(self, sessions: Sequence[str], tokens: int, seconds: float) -> "DraftTiming":
        """Returns the timing updated by a pass for these sessions, whose longest block had `tokens` tokens.

        A pass that fed a prompt is not counted, because it does not measure drafting.
        """
        expected_s = self.profile.seconds(len(sessions), tokens)
        known = self.read.issuperset(sessions)
        pace = pace_after(self.pace, seconds / expected_s) if known and tokens and expected_s else self.pace
        return replace(self, pace=pace, read=self.read | frozenset(sessions))

    def without(self, sessions: Sequence[str]) -> "DraftTiming":
        """Returns the timing without these sessions, which have ended."""
        return replace(self, read=self.read - frozenset(sessions))

    @property
    def cost(self) -> DraftCost:
        """Current cost of passes."""
        return self.profile.times(self.pace.value) if self.pace.count else self.profile
