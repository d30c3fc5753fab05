"""When a verdict is due, estimated from the steps before it; a block drafted ahead is worth little after it.

Pure arithmetic; times are handed in.
"""

from cluster.pacing.smoothing import blend
from protos.values import value

MEMORY = 0.125  # weight of the latest step, as in the round-trip times of TCP (RFC 6298)


@value
class StepIntervalEstimate:
    """Steps of one target, as a drafter sees them: from what begins one to its verdict."""

    mean_s: float = 0.0  # 0: none seen yet
    deviation_s: float = 0.0  # mean distance from it; it rises slowly, for what is drafted ahead in vain costs little

    def after(self, seconds: float) -> "StepIntervalEstimate":
        if not self.mean_s:
            return StepIntervalEstimate(seconds)
        distance = abs(seconds - self.mean_s)
        return StepIntervalEstimate(blend(self.mean_s, seconds, MEMORY), blend(self.deviation_s, distance, MEMORY))

    @property
    def least_s(self) -> float | None:
        """What a step hardly ever takes less than; None while nothing is known."""
        return max(0.0, self.mean_s - self.deviation_s) if self.mean_s else None
