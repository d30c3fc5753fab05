"""Whether what computes makes progress: how long a piece of work may take follows what it was measured to cost."""

from dataclasses import dataclass
from typing import NamedTuple

TIMES = 30.0  # what was measured: machines stall, and a text that is long costs more than the short rows of a profile
LEAST_S = 10.0  # whatever was measured: to be wrong costs a replica and its sessions a prefill elsewhere
MOST_S = 60.0


@dataclass(frozen=True, slots=True)
class Patience:
    """With one piece of work."""

    most_s: float = MOST_S
    least_s: float = LEAST_S
    times: float = TIMES

    def limit_s(self, expected_s: float | None) -> float:
        """How long it may take that is expected to take so long; None: that is not known."""
        if expected_s is None:
            return self.most_s
        return min(self.most_s, max(self.least_s, self.times * expected_s))


class _Work(NamedTuple):
    began_s: float
    limit_s: float


class ProgressWatch:
    """Of one that takes one piece of work after the other, and rests where there is none. Any thread may ask."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._work: _Work | None = None  # replaced as a whole

    def works(self, expected_s: float | None, now: float) -> float:
        """A piece of work begins; returns how long it may take."""
        limit_s = self._patience.limit_s(expected_s)
        self._work = _Work(now, limit_s)
        return limit_s

    def rests(self) -> None:
        """It is done."""
        self._work = None

    def stuck_s(self, now: float) -> float | None:
        """How long the work at hand has taken, where that is longer than it may take."""
        work = self._work
        if work is None or now - work.began_s <= work.limit_s:
            return None
        return now - work.began_s
