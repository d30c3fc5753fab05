"""Measured cost of a target's steps, and from it the value of a second of the replica.

A profile at startup gives the shape of the cost over rows and tokens; the steps themselves give its scale. Live steps
are much alike, so a curve fitted to them alone would not predict steps of another size, in particular the
non-speculative steps that speculation is compared with. Those are rare where speculation pays, and a machine's pace
drifts between them. Their estimate is therefore kept relative to the pace of the speculative steps around them. Pure
arithmetic; callers pass times in.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from cluster.costs import ForwardCost
from cluster.speculation.acceptance import POSITIONS
from cluster.speculation.ewma import Mean

MEMORY = 0.05  # weight of the latest step: about twenty steps or one second
# Weight of the latest non-speculative step: the steps of one look outweigh all earlier ones. The cost of drafters on
# the target's own machine changes within seconds; with older looks, a loss of 5 % was taken for a gain of 5 %.
PLAIN_MEMORY = 0.15
COMPARED = 8  # non-speculative steps in a row compared with the speculative ones before; later ones set the pace
UNKNOWN = ForwardCost(by_tokens=((1, 1.0),))  # without a profile, further tokens are taken to cost nothing


def pace_after(pace: Mean, ratio: float, memory: float = MEMORY) -> Mean:
    """Returns the pace, as a multiple of the profile's shape, after one more step or pass.

    A measurement counts for at most twice the current pace, so a step that hung has little effect.
    """
    return pace.after(min(ratio, 2 * pace.value or ratio), memory)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step by its rows and tokens; 0 while nothing is known."""

    shape: ForwardCost
    pace: Mean  # speculative steps as a multiple of the shape, without the wait before them
    plain: Mean = Mean()  # non-speculative steps as a multiple of that, from one step's end to the next
    prompts: Mean = Mean()  # the same for non-speculative steps that feed prompts: a profile has short rows
    plain_run: int = COMPARED  # non-speculative steps since the last speculative one

    @classmethod
    def profiled(cls, profile: ForwardCost | None) -> "StepCost":
        return cls(profile or UNKNOWN, Mean(0, float(profile is not None)))

    def after_plain(self, rows: int, seconds: float) -> "StepCost":
        """Records a step without drafts for which none were requested."""
        ratio = seconds / self.shape.seconds(rows, rows)
        run = self.plain_run + 1
        if run > COMPARED:
            return replace(self, pace=pace_after(self.pace, ratio / self._plain_scale), plain_run=run)
        plain = pace_after(self.plain, ratio / self.pace.value, PLAIN_MEMORY)
        return replace(self, plain=plain, plain_run=run)

    def after_prompts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """Records a step without drafts in which some rows feed prompts."""
        if not self.pace.value:
            return self  # no pace yet to compare with
        ratio = seconds / self.shape.seconds(rows, tokens) / self.pace.value
        return replace(self, prompts=pace_after(self.prompts, ratio))

    def after_drafts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """Records a step made while drafters were at work."""
        return replace(self, pace=pace_after(self.pace, seconds / self.shape.seconds(rows, tokens)), plain_run=0)

    def plain_s(self, rows: int) -> float:
        """Returns the seconds of a step of one token per row while no drafter works."""
        return self._plain_scale * self.pace.value * self.shape.seconds(rows, rows)

    def prompts_s(self, rows: int, tokens: int) -> float:
        """Returns the seconds of a step that also feeds prompts while no drafter works; 0 before any such step."""
        return self.prompts.value * self.pace.value * self.shape.seconds(rows, tokens)

    def drafts_s(self, rows: int, tokens: float) -> float:
        """Returns the seconds of a step of `tokens` tokens in all, drafts among them."""
        return self.pace.value * self.shape.seconds(rows, tokens)

    @property
    def cost(self) -> ForwardCost:
        """Current cost of speculative steps."""
        return self.shape.times(self.pace.value) if self.pace.count else self.shape

    @property
    def plain_cost(self) -> ForwardCost | None:
        """Current cost of steps of one token per row while no drafter works, including the time between steps.

        None until such a step was compared with speculative ones.
        """
        return self.shape.times(self._plain_scale * self.pace.value) if self.plain.count else None

    @property
    def _plain_scale(self) -> float:
        return self.plain.value if self.plain.count else 1.0


@dataclass(frozen=True)
class Load:
    """The replica's current load and the value of a second."""

    step: StepCost = field(default_factory=lambda: StepCost.profiled(None))
    sessions: int = 1  # sessions that are decoding
    gain: float = 1.0  # recent throughput over that of non-speculative decoding
    speculates: bool = True  # False while speculation is known to lose

    @cached_property
    def plain_rate(self) -> float:
        """Tokens per second without speculation; 0 while unknown."""
        step_s = self.step.plain_s(self.sessions)
        return self.sessions / step_s if step_s else 0.0

    @cached_property
    def rate(self) -> float:
        """Tokens per second at the better of the two modes: the value of a second."""
        return max(1.0, self.gain) * self.plain_rate

    @cached_property
    def token_s(self) -> tuple[float, ...]:
        """Seconds that the first, second, ... draft token of each session adds to a step."""
        rows = self.sessions
        steps = [self.step.drafts_s(rows, rows * (1 + length)) for length in range(POSITIONS + 1)]
        return tuple([max(0.0, later - earlier) / rows for earlier, later in pairwise(steps)])
