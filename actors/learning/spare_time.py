"""Spare time of a trainer in the background: it computes while its cores are idle and rests while others want them.

Idle priority alone is not enough. A background trainer still takes half a core from a drafter with idle priority, and
evicts its cores' caches.
"""

import time
from collections.abc import Callable

# Minimum share of a pass spent on a core; a lower share means that other threads needed the core.
CONTENDED_SHARE = 0.8
FIRST_REST_S = 0.25
LONGEST_REST_S = 30.0


class SpareTime:
    """Lengthens the pauses between passes while passes wait for a core.

    Each contended pass doubles the pause, up to `LONGEST_REST_S`; an uncontended pass resets it to zero. Passes that
    take 0.3 s thus use one percent of a busy core.
    """

    def __init__(
        self,
        rest: Callable[[float], object],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`rest` sleeps for a number of seconds, or less once the trainer is to stop."""
        self._rest = rest
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._rest_s = 0.0
        self._start: tuple[float, float] | None = None  # start of the current pass on both clocks

    def pause(self) -> None:
        """Ends a pass and rests as long as needed; the training thread calls it before each pass."""
        if self._start is not None:
            elapsed_s = self._clock() - self._start[0]
            is_contended = self._cpu_clock() - self._start[1] < CONTENDED_SHARE * elapsed_s
            self._rest_s = min(LONGEST_REST_S, max(FIRST_REST_S, 2 * self._rest_s)) if is_contended else 0.0
            if self._rest_s:
                self._rest(self._rest_s)
        self._start = self._clock(), self._cpu_clock()
