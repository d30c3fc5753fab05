"""What speculation has brought in fact, at each load, and for how long it is left off where it lost.

Pacing reckons with costs that it knows; what it does not know of (drafters that share memory, cores or network with the
target) shows only in what comes out. So where speculation was slower than plain decoding it is left off for a while,
however well it should have paid. Knows nothing of sessions, steps or clocks.
"""

import math
from dataclasses import dataclass

MEMORY = 0.02  # weight of the latest step
PROOF = 48  # steps before anything is concluded
FIRST_PAUSE, LONGEST_PAUSE = 256, 8192  # steps; doubles while speculation keeps losing
FIRST_LOOK = 16  # steps of speculation before it is known what plain ones cost
LOOK_STEPS = 8  # plain ones that are made now and then, to see what they cost by now
LOOK_AGAIN, LOOK_AGAIN_SOON = 1024, 256  # steps of speculation between; the latter where it is a close call
CLOSE = 0.2  # gains less than this above or below 1


@dataclass(slots=True)
class _AtLoad:
    """Decayed sums over steps: how many, their gain, and its square."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    steps: int = 0  # since it was last taken up
    looks: int = 0  # at what plain steps cost
    off_for: int = 0  # steps that are still to be made without
    pause: int = FIRST_PAUSE

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 1.0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(max(0.0, self.squares / self.weight - self.mean**2) / self.weight)


class TrackRecord:
    """By the number of sessions at once, to the power of two."""

    def __init__(self) -> None:
        self._loads: dict[int, _AtLoad] = {}

    def is_on(self, sessions: int) -> bool:
        """Whether drafts are to be asked for."""
        return self._at(sessions).off_for == 0

    def gain(self, sessions: int) -> float:
        """Throughput with speculation over that of plain decoding; 1 while nothing is known."""
        return self._at(sessions).mean

    def plain_step(self, sessions: int) -> None:
        """A step was made without."""
        at = self._at(sessions)
        at.off_for = max(0, at.off_for - 1)

    def step(self, sessions: int, gain: float) -> None:
        """A step was made with speculation: `gain` is its tokens over those of plain decoding in the same time."""
        at, keep = self._at(sessions), 1 - MEMORY
        if at.looks == 0:
            at.steps += 1
            if at.steps == FIRST_LOOK:
                self._look(at)
            return
        at.weight, at.total = keep * at.weight + 1, keep * at.total + gain
        at.squares = keep * at.squares + gain * gain
        at.steps += 1
        if at.steps >= PROOF and at.mean + at.error < 1.0:
            pause = min(2 * at.pause, LONGEST_PAUSE)
            self._loads[_bucket(sessions)] = _AtLoad(looks=at.looks, off_for=at.pause, pause=pause)
        elif at.steps % (LOOK_AGAIN_SOON if abs(at.mean - 1) < CLOSE else LOOK_AGAIN) == 0:
            at.pause = FIRST_PAUSE
            self._look(at)

    def _look(self, at: _AtLoad) -> None:
        at.off_for, at.steps, at.looks = LOOK_STEPS, 0, at.looks + 1

    def _at(self, sessions: int) -> _AtLoad:
        return self._loads.setdefault(_bucket(sessions), _AtLoad())


def _bucket(sessions: int) -> int:
    return sessions.bit_length()
