"""What a target's steps cost, and with that what a second of the replica is worth: measured, for pacing to reckon with.

Steps have their shape from a profile at start, their scale from the steps themselves. Live steps are much alike, so a
curve fitted to them alone would say little of steps of another size, least of all of the plain steps that speculation
is compared with. Those are rare where speculation pays, and a machine's pace drifts meanwhile: so what is kept of them
is how long they take at the pace of the steps with drafts around them. Pure arithmetic; times are handed in.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from cluster.costs import ForwardCost
from cluster.pacing.acceptance import POSITIONS
from cluster.pacing.smoothing import Mean

MEMORY = 0.05  # weight of the latest step: some twenty steps, about a second
# Weight of the latest plain step: those of one look outweigh all before. What drafters cost a target that shares a
# machine with them changes within seconds; by looks of long ago a loss of 5 % was taken for a gain of 5 %.
PLAIN_MEMORY = 0.15
COMPARED = 8  # plain steps in a row that are compared with the steps with drafts before them; later ones set the pace
UNKNOWN = ForwardCost(by_tokens=((1, 1.0),))  # without a profile further tokens are taken for free


def pace_after(pace: Mean, ratio: float, memory: float = MEMORY) -> Mean:
    """Of steps or passes, as times their shape. One that hung for whatever reason does not count for more than two."""
    return pace.after(min(ratio, 2 * pace.value or ratio), memory)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step over its rows and tokens; 0 while nothing is known."""

    shape: ForwardCost
    pace: Mean  # times the shape: of steps with drafts alone, without the wait before them
    plain: Mean = Mean()  # times that: of plain steps, from one step's end to the next's
    prompts: Mean = Mean()  # the same of plain steps that feed prompts: a profile is of short rows
    plain_run: int = COMPARED  # plain steps since the last one with drafts

    @classmethod
    def profiled(cls, profile: ForwardCost | None) -> "StepCost":
        return cls(profile or UNKNOWN, Mean(0, float(profile is not None)))

    def after_plain(self, rows: int, seconds: float) -> "StepCost":
        """A step without drafts, when none were asked for."""
        ratio = seconds / self.shape.seconds(rows, rows)
        run = self.plain_run + 1
        if run > COMPARED:
            return replace(self, pace=pace_after(self.pace, ratio / self._plain_scale), plain_run=run)
        plain = pace_after(self.plain, ratio / self.pace.value, PLAIN_MEMORY)
        return replace(self, plain=plain, plain_run=run)

    def after_prompts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """A step without drafts in which some rows feed prompts."""
        if not self.pace.value:
            return self  # it has nothing yet to be compared with
        ratio = seconds / self.shape.seconds(rows, tokens) / self.pace.value
        return replace(self, prompts=pace_after(self.prompts, ratio))

    def after_drafts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """A step while there were drafters at work."""
        return replace(self, pace=pace_after(self.pace, seconds / self.shape.seconds(rows, tokens)), plain_run=0)

    def plain_s(self, rows: int) -> float:
        """One token a row, with nobody drafting."""
        return self._plain_scale * self.pace.value * self.shape.seconds(rows, rows)

    def prompts_s(self, rows: int, tokens: int) -> float:
        """Prompts among the tokens, with nobody drafting; 0 while no such step was seen."""
        return self.prompts.value * self.pace.value * self.shape.seconds(rows, tokens)

    def drafts_s(self, rows: int, tokens: float) -> float:
        """So many tokens in all, drafts among them."""
        return self.pace.value * self.shape.seconds(rows, tokens)

    @property
    def cost(self) -> ForwardCost:
        """What steps with drafts cost by now."""
        return self.shape.times(self.pace.value) if self.pace.count else self.shape

    @property
    def plain_cost(self) -> ForwardCost | None:
        """What steps of one token a row cost by now with nobody drafting, and what lies between them.

        None while no such step was compared with those with drafts.
        """
        return self.shape.times(self._plain_scale * self.pace.value) if self.plain.count else None

    @property
    def _plain_scale(self) -> float:
        return self.plain.value if self.plain.count else 1.0


@dataclass(frozen=True)
class Load:
    """What the replica is doing now, and what a second of it is worth."""

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
    def token_s(self) -> tuple[float, ...]:
        """Of the first, second, ... draft token of each session."""
        rows = self.sessions
        steps = [self.step.drafts_s(rows, rows * (1 + length)) for length in range(POSITIONS + 1)]
        return tuple([max(0.0, later - earlier) / rows for earlier, later in pairwise(steps)])
