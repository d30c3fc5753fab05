"""The time at which a verdict is due, estimated from earlier steps; a block drafted ahead is worth little after it.

Pure arithmetic; the caller passes times in.
"""

from cluster.speculation.ewma import blend
from protos.frozen import value

MEMORY = 0.125  # weight of the latest step, as in the round-trip times of TCP (RFC 6298)


@value
class StepIntervalEstimate:
    """Interval of one target's steps as a drafter sees them: from the event that begins a step to its verdict."""

    mean_s: float = 0.0  # 0: no step seen yet
    deviation_s: float = 0.0  # mean absolute deviation; rises slowly, since a wasted draft costs little

    def after(self, seconds: float) -> "StepIntervalEstimate":
        if not self.mean_s:
            return StepIntervalEstimate(seconds)
        distance = abs(seconds - self.mean_s)
        return StepIntervalEstimate(blend(self.mean_s, seconds, MEMORY), blend(self.deviation_s, distance, MEMORY))

    @property
    def least_s(self) -> float | None:
        """Shortest time that a step is likely to take, in seconds; None before any measurement."""
        return max(0.0, self.mean_s - self.deviation_s) if self.mean_s else None
