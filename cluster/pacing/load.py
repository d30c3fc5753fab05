"""What a target replica is doing now, and what a second of its time is worth: measured, for pacing.

Pure arithmetic; times are handed in.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from cluster.pacing.acceptance import POSITIONS
from cluster.pacing.step_cost import StepCost


@dataclass(frozen=True)
class Load:
    """What the replica is doing now."""

    step: StepCost = field(default_factory=lambda: StepCost.profiled(None))
    sessions: int = 1  # that are decoding
    gain: float = 1.0  # throughput of late over that of plain decoding
    speculates: bool = True  # whether that is not known to lose

    @cached_property
    def plain_rate(self) -> float:
        """Tokens a second without speculation; 0: not known yet."""
        step_s = self.step.plain_s(self.sessions)
        return self.sessions / step_s if step_s else 0.0

    @cached_property
    def rate(self) -> float:
        """Tokens a second, which is what a second is worth."""
        return max(1.0, self.gain) * self.plain_rate

    @cached_property
    def row_s(self) -> float:
        """Of one session more in a step."""
        return max(0.0, self.step.plain_s(self.sessions + 1) - self.step.plain_s(self.sessions))

    @cached_property
    def token_s(self) -> tuple[float, ...]:
        """Of the first, second, ... draft token of each session."""
        rows = self.sessions
        steps = [self.step.drafts_s(rows, rows * (1 + length)) for length in range(POSITIONS + 1)]
        return tuple([max(0.0, later - earlier) / rows for earlier, later in pairwise(steps)])
