"""Watchdog: detects stuck work by a time limit proportional to its expected duration."""

from dataclasses import dataclass
from typing import NamedTuple

TIMEOUT_FACTOR = 30.0  # time limit over expected duration: machines stall, and long texts exceed the profile
MIN_TIMEOUT_S = 10.0  # minimum time limit: a false alarm costs a replica and the prefill of its sessions
MAX_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TimeoutPolicy:
    """Computes time limits of work."""

    max_s: float = MAX_TIMEOUT_S
    min_s: float = MIN_TIMEOUT_S
    factor: float = TIMEOUT_FACTOR

    def limit_s(self, expected_s: float | None) -> float:
        """Returns the time limit, in seconds, for work with expected duration `expected_s`, in seconds.

        Without an expected duration, the limit is `max_s`.
        """
        if expected_s is None:
            return self.max_s
        return min(self.max_s, max(self.min_s, self.factor * expected_s))


class _Task(NamedTuple):
    began_s: float
    limit_s: float


class Watchdog:
    """Watches a worker that performs one task at a time and may be idle in between. Any thread may query it."""

    def __init__(self, policy: TimeoutPolicy) -> None:
        self._policy = policy
        self._task: _Task | None = None  # replaced atomically, because other threads read it

    def begin_task(self, expected_s: float | None, now: float) -> float:
        """Records the start of a task; returns its time limit in seconds."""
        limit_s = self._policy.limit_s(expected_s)
        self._task = _Task(now, limit_s)
        return limit_s

    def end_task(self) -> None:
        """Records the end of the task."""
        self._task = None

    def stuck_s(self, now: float) -> float | None:
        """Returns the duration of the current task in seconds if it exceeds the limit; None otherwise."""
        task = self._task
        if task is None or now - task.began_s <= task.limit_s:
            return None
        return now - task.began_s
