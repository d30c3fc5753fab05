"""Delays before a new size is followed: short upwards, long downwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wishes:
    """Sizes that a pool needed so far, by level: a need for three counts for two and for one, too.

    This damps noise. The size grows to the smallest need throughout the upward delay, and shrinks to the largest need
    within the downward delay.
    """

    since: Mapping[int, float] = field(default_factory=dict)  # by level: time since which at least this size was needed
    last: Mapping[int, float] = field(default_factory=dict)  # by level: last time that at least this size was needed

    @classmethod
    def at_start(cls, present: int, now: float) -> "Wishes":
        """Returns an empty history, as if the present size had been needed until now."""
        return cls({}, dict.fromkeys(range(1, present + 1), now))

    def after(self, wished: int, now: float) -> "Wishes":
        """Returns the history with the latest need added."""
        levels = range(1, wished + 1)
        return Wishes(
            {level: self.since.get(level, now) for level in levels}, {**self.last, **dict.fromkeys(levels, now)}
        )

    def size(self, present: int, now: float, up_delay_s: float, down_delay_s: float) -> int:
        """Returns the size to have now."""
        least = max((level for level, since in self.since.items() if now - since >= up_delay_s), default=0)
        most = max((level for level, last in self.last.items() if now - last <= down_delay_s), default=0)
        return min(max(present, least), most)
