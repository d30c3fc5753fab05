"""How long a target's steps take: their shape by a profile at start, their scale by the steps themselves.

Live steps are much alike, so a curve fitted to them alone would say little of steps of another size, least of all of
the plain steps that speculation is compared with. Steps with and without drafts are scaled apart: drafters are busy
beside the former. Pure arithmetic.
"""

from dataclasses import dataclass, replace

from cluster.costs import ForwardCost

MEMORY = 0.05  # weight of the latest step
UNKNOWN = ForwardCost(by_tokens=((1, 1.0),))  # without a profile further tokens are taken for free


@dataclass(frozen=True, slots=True)
class Scale:
    """Times the shape: a decayed mean."""

    steps: int = 0
    mean: float = 0.0

    def after(self, ratio: float) -> "Scale":
        """One step that hung for whatever reason does not count for more than two."""
        weight = max(MEMORY, 1 / (self.steps + 1))
        return Scale(self.steps + 1, (1 - weight) * self.mean + weight * min(ratio, 2 * self.mean or ratio))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step over its rows and tokens; 0 while nothing is known."""

    shape: ForwardCost
    is_profiled: bool
    plain: tuple[tuple[int, Scale], ...] = ()  # by rows, to the power of two: from one plain step's end to the next's
    drafts: Scale = Scale()  # of steps with drafts alone, without the wait before them

    @classmethod
    def profiled(cls, profile: ForwardCost | None) -> "StepCost":
        return cls(profile or UNKNOWN, profile is not None)

    def after_plain(self, rows: int, seconds: float) -> "StepCost":
        """A step without drafts, when none were asked for."""
        scales, size = dict(self.plain), rows.bit_length()
        scales[size] = scales.get(size, Scale()).after(seconds / self.shape.seconds(rows, rows))
        return replace(self, plain=tuple(sorted(scales.items())))

    def after_drafts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """A step while there were drafters at work."""
        return replace(self, drafts=self.drafts.after(seconds / self.shape.seconds(rows, tokens)))

    def plain_s(self, rows: int) -> float:
        """One token a row, with nobody drafting."""
        scale = next((scale.mean for size, scale in self.plain if size >= rows.bit_length()), None)
        if scale is None:
            scale = self.plain[-1][1].mean if self.plain else self._unmeasured
        return scale * self.shape.seconds(rows, rows)

    def drafts_s(self, rows: int, tokens: float) -> float:
        """So many tokens in all, drafts among them."""
        scale = self.drafts.mean or (self.plain[-1][1].mean if self.plain else self._unmeasured)
        return scale * self.shape.seconds(rows, tokens)

    @property
    def _unmeasured(self) -> float:
        return self.drafts.mean or float(self.is_profiled)
