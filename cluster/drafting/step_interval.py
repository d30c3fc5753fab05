"""When a verdict is due, estimated from the steps before it; a block drafted ahead is worth little after it.

Pure arithmetic; times are handed in.
"""

from cluster.pacing.smoothing import Mean
from protos.values import value

MEMORY = 0.125  # weight of the latest step, as in the round-trip times of TCP (RFC 6298)


@value
class StepIntervalEstimate:
    """Steps of one target, as a drafter sees them: from what begins one to its verdict."""

    step_s: Mean = Mean()
    deviation_s: Mean = Mean()  # distance from it

    def after(self, seconds: float) -> "StepIntervalEstimate":
        if not self.step_s.count:
            return StepIntervalEstimate(self.step_s.after(seconds, MEMORY))
        deviation_s = self.deviation_s.after(abs(seconds - self.step_s.value), MEMORY)
        return StepIntervalEstimate(self.step_s.after(seconds, MEMORY), deviation_s)

    @property
    def least_s(self) -> float | None:
        """What a step hardly ever takes less than; None while nothing is known."""
        return max(0.0, self.step_s.value - self.deviation_s.value) if self.step_s.count else None
