"""Detects stuck work by a time limit, which is a multiple of the measured cost of such work."""

from dataclasses import dataclass
from typing import NamedTuple

TIMEOUT_FACTOR = 30.0  # limit over measured cost: machines stall, and long texts cost more than a profile's short rows
MIN_TIMEOUT_S = 10.0  # lower bound of the limit: a false alarm costs a replica, and a new prefill for its sessions
MAX_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TimeoutPolicy:
    """Time limits for one piece of work."""

    max_s: float = MAX_TIMEOUT_S
    min_s: float = MIN_TIMEOUT_S
    factor: float = TIMEOUT_FACTOR

    def limit_s(self, expected_s: float | None) -> float:
        """Returns the time limit, in seconds, of work expected to take `expected_s` seconds.

        If `expected_s` is None, the limit is `max_s`.
        """
        if expected_s is None:
            return self.max_s
        return min(self.max_s, max(self.min_s, self.factor * expected_s))


class _Work(NamedTuple):
    began_s: float
    limit_s: float


class Watchdog:
    """Watches a worker that does one piece of work at a time and may be idle in between. Any thread may query it."""

    def __init__(self, patience: TimeoutPolicy) -> None:
        self._patience = patience
        self._work: _Work | None = None  # replaced as a whole, because other threads read it

    def works(self, expected_s: float | None, now: float) -> float:
        """Records the start of a piece of work; returns its time limit in seconds."""
        limit_s = self._patience.limit_s(expected_s)
        self._work = _Work(now, limit_s)
        return limit_s

    def rests(self) -> None:
        """Records the end of the work."""
        self._work = None

    def stuck_s(self, now: float) -> float | None:
        """Returns the seconds that the current work has taken if they exceed its limit; None otherwise."""
        work = self._work
        if work is None or now - work.began_s <= work.limit_s:
            return None
        return now - work.began_s
