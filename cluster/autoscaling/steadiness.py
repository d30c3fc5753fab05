"""When a wish for another size is followed: after it has lasted, upwards for a little, downwards for long."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wishes:
    """What sizes a pool was wished to have, by level: a wish for three is one for two and for one, too.

    So noise moves nothing: the size grows to the least that was wished for all along the delay upwards, and shrinks to
    the most that was wished at all within the delay downwards.
    """

    since: Mapping[int, float] = field(default_factory=dict)  # since when at least so many have been wished for
    last: Mapping[int, float] = field(default_factory=dict)  # when at least so many were wished for last

    @classmethod
    def at_start(cls, present: int, now: float) -> "Wishes":
        """Nothing is remembered: as if the present size had been wished for until now."""
        return cls({}, dict.fromkeys(range(1, present + 1), now))

    def after(self, wished: int, now: float) -> "Wishes":
        """With the latest one."""
        levels = range(1, wished + 1)
        return Wishes(
            {level: self.since.get(level, now) for level in levels}, {**self.last, **dict.fromkeys(levels, now)}
        )

    def size(self, present: int, now: float, up_delay_s: float, down_delay_s: float) -> int:
        """The size to have now."""
        least = max((level for level, since in self.since.items() if now - since >= up_delay_s), default=0)
        most = max((level for level, last in self.last.items() if now - last <= down_delay_s), default=0)
        return min(max(present, least), most)
