"""Virtual time: a queue of events in order."""

import heapq
from collections.abc import Callable
from itertools import count

Happening = Callable[[], None]
STANDSTILL = 200_000  # events at one instant that indicate an endless loop of zero-delay alarms


class Clock:
    """Jumps from one event to the next; events at equal times run in the order in which they were set."""

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
        """Runs until no event is due; returns the number of events. Raises AssertionError if time stands still."""
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
