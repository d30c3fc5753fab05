"""Virtual time: a queue of events in order."""

import heapq
from collections.abc import Callable
from itertools import count

Happening = Callable[[], None]
STANDSTILL = 200_000  # happenings at one moment: somebody sets himself an alarm for now, again and again


class Clock:
    """Jumps from one happening to the next; equal times keep the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Happening]] = []
        self._order = count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, happen: Happening) -> None:
        heapq.heappush(self._due, (max(time, self.now), next(self._order), happen))

    def after(self, delay: float, happen: Happening) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._order), happen))

    def run(self) -> int:
        """Until nothing is due; returns how much happened. AssertionError when time stands still."""
        happened = 0
        moment = 0
        due = self._due
        pop = heapq.heappop
        while due:
            time, _, happen = pop(due)
            if time > self.now:
                self.now = time
                moment = happened
            happen()
            happened += 1
            assert happened - moment < STANDSTILL, f"time stands still at {self.now} s"
        return happened
