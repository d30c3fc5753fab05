"""How long a target's steps take: shape from a profile at start, scale from the steps themselves.

Live steps are much alike, so a curve fitted to them alone would say little of steps of another size, least of all of
the plain steps that speculation is compared with. Those are rare where speculation pays, and a machine's pace drifts
meanwhile: so what is kept of them is how long they take at the pace of the steps with drafts around them. Pure
arithmetic.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

from cluster.costs import ForwardCost

MEMORY = 0.05  # weight of the latest step in the pace
PLAIN_MEMORY = 0.02  # and of the latest plain one in how plain steps compare, which hardly changes with the pace
COMPARED = 8  # plain steps in a row that are compared with the steps with drafts before them; later ones set the pace
PLAIN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # of plain steps whose cost is published
UNKNOWN = ForwardCost(by_tokens=((1, 1.0),))  # without a profile further tokens are taken for free


@dataclass(frozen=True, slots=True)
class Scale:
    """Times the shape: a decayed mean."""

    steps: int = 0
    mean: float = 0.0

    def after(self, ratio: float, memory: float = MEMORY) -> "Scale":
        """One step that hung for whatever reason does not count for more than two."""
        weight = max(memory, 1 / (self.steps + 1))
        return Scale(self.steps + 1, (1 - weight) * self.mean + weight * min(ratio, 2 * self.mean or ratio))


def octave(count: int) -> int:
    """Which power of two it is nearest to: 3 to 5, 6 to 11, 12 to 22 are alike."""
    return (count * count).bit_length() // 2


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step over its rows and tokens; 0 while nothing is known."""

    shape: ForwardCost
    pace: Scale  # of late: of steps with drafts alone, without the wait before them
    plain: tuple[tuple[int, Scale], ...] = ()  # times that, by octaves of rows: from one step's end to the next's
    plain_run: int = COMPARED  # plain steps since the last one with drafts

    @classmethod
    def profiled(cls, profile: ForwardCost | None) -> "StepCost":
        return cls(profile or UNKNOWN, Scale(0, float(profile is not None)))

    def after_plain(self, rows: int, seconds: float) -> "StepCost":
        """A step without drafts, when none were asked for."""
        ratio = seconds / self.shape.seconds(rows, rows)
        run = self.plain_run + 1
        if run > COMPARED:
            return replace(self, pace=self.pace.after(ratio / self._plain_scale(rows)), plain_run=run)
        scales = dict(self.plain)
        size = octave(rows)
        scales[size] = scales.get(size, Scale()).after(ratio / self.pace.mean, PLAIN_MEMORY)
        return replace(self, plain=tuple(sorted(scales.items())), plain_run=run)

    def after_drafts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """A step while there were drafters at work."""
        return replace(self, pace=self.pace.after(seconds / self.shape.seconds(rows, tokens)), plain_run=0)

    def plain_s(self, rows: int) -> float:
        """One token a row, with nobody drafting."""
        return self._plain_scale(rows) * self.pace.mean * self.shape.seconds(rows, rows)

    def drafts_s(self, rows: int, tokens: float) -> float:
        """So many tokens in all, drafts among them."""
        return self.pace.mean * self.shape.seconds(rows, tokens)

    @property
    def cost(self) -> ForwardCost:
        """What steps with drafts cost by now."""
        return self.shape.times(self.pace.mean) if self.pace.steps else self.shape

    @property
    def plain_cost(self) -> ForwardCost | None:
        """What steps of one token a row cost by now with nobody drafting, and what lies between them.

        None while no such step was compared with those with drafts. More rows never cost less, whatever was measured.
        """
        if not self.plain:
            return None
        seconds = accumulate((self.plain_s(rows) for rows in PLAIN_ROWS), max)
        return ForwardCost(by_tokens=tuple(zip(PLAIN_ROWS, seconds, strict=True)))

    def _plain_scale(self, rows: int) -> float:
        scale = next((scale.mean for size, scale in self.plain if size >= octave(rows)), None)
        if scale is None:
            scale = self.plain[-1][1].mean if self.plain else 1.0
        return scale
