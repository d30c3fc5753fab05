"""What a target replica is doing now, and what a second of it is worth: measured, for pacing to reckon with.

Pure arithmetic; times are handed in.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from cluster.step_cost import StepCost
from cluster.yields import POSITIONS


@dataclass(frozen=True)
class DraftDelay:
    """From a verdict to its block: `base_s` + `token_s` per token, by least squares over decayed measurements."""

    weight: float = 0.0
    tokens: float = 0.0  # weighted sums: of tokens, seconds, tokens squared, tokens x seconds
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0

    def after(self, tokens: int, seconds: float) -> "DraftDelay":
        keep = 0.99
        return DraftDelay(
            keep * self.weight + 1,
            keep * self.tokens + tokens,
            keep * self.seconds + seconds,
            keep * self.tokens_squared + tokens * tokens,
            keep * self.product + tokens * seconds,
        )

    @cached_property
    def token_s(self) -> float:
        """Of one token more; 0 while all steps were of one size."""
        spread = self.weight * self.tokens_squared - self.tokens**2
        if spread <= 1e-6 * self.tokens_squared:
            return 0.0
        slope = (self.weight * self.product - self.tokens * self.seconds) / spread
        return min(max(0.0, slope), self.seconds / self.tokens)

    @cached_property
    def base_s(self) -> float:
        """Before the first token."""
        return max(0.0, self.seconds - self.token_s * self.tokens) / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class Load:
    """What the replica is doing now."""

    step: StepCost = field(default_factory=lambda: StepCost.profiled(None))
    draft: DraftDelay = field(default_factory=DraftDelay)  # of blocks that were not there already
    sessions: int = 1  # that are decoding
    gain: float = 1.0  # throughput of late over that of plain decoding
    speculates: bool = True  # whether that is not known to lose

    def after_draft(self, tokens: int, delay_s: float) -> "Load":
        """A block of so many tokens came, so long after the verdict that asked for it."""
        return Load(self.step, self.draft.after(tokens, delay_s), self.sessions, self.gain, self.speculates)

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
