"""Whether speculation is on at each load: what it brought in fact against plain steps.

Pacing reckons with costs that it knows; what it does not know of (drafters that share memory, cores or network with the
target) shows only in what comes out. So where speculation was slower than plain decoding it is left off for a while,
however well it should have paid.
"""

import math
from dataclasses import dataclass

from cluster.pacing.step_cost import octave

MEMORY = 0.02  # weight of the latest step
PROOF = 48  # steps before anything is concluded; the latter where it is beyond doubt
CLEAR_PROOF = 16
PRICE = 0.01  # of the time, about, is lost by trying what loses
LEAST_PAUSE = 64  # steps
LONGEST_PAUSE = 8192
FIRST_LOOK = 8  # steps of speculation before it is known what plain ones cost
LOOK_STEPS = 8  # plain ones that are made now and then, to see what they cost by now
ENOUGH_LOOKS = 2  # without which nothing is called a loss: a few plain steps may have been lucky
SECOND_LOOK = 32  # steps of speculation after the first one; the third after twice as many, and so on
LOOK_AGAIN = 1024  # at most; the latter where it is a close call
LOOK_AGAIN_SOON = 128
MOST_LOSSES = 7  # in a row that are told apart: the pause is at its longest by then
CLOSE = 0.2  # gains less than this above or below 1
CLEAR = 2.0  # a gain that misjudged plain steps do not explain


@dataclass(slots=True)
class _AtLoad:
    """Decayed sums over steps: tokens, what plain decoding would have brought, and their products."""

    tokens: float = 0.0
    plain: float = 0.0
    tokens_squared: float = 0.0
    plain_squared: float = 0.0
    product: float = 0.0
    steps: int = 0  # since it was last taken up
    looks: int = 0  # at what plain steps cost
    off_for: int = 0  # steps that are still to be made without
    losses: int = 0  # in a row, when it was on the last times

    def add(self, tokens: float, plain: float) -> None:
        keep = 1 - MEMORY
        self.tokens = keep * self.tokens + tokens
        self.plain = keep * self.plain + plain
        self.tokens_squared = keep * self.tokens_squared + tokens * tokens
        self.plain_squared = keep * self.plain_squared + plain * plain
        self.product = keep * self.product + tokens * plain

    @property
    def gain(self) -> float:
        return self.tokens / self.plain if self.plain else 1.0

    @property
    def error(self) -> float:
        """Standard error of the gain, as that of a ratio of sums."""
        gain = self.gain
        squares = self.tokens_squared - 2 * gain * self.product + gain * gain * self.plain_squared
        return math.sqrt(max(0.0, squares)) / self.plain if self.plain else 0.0

    @property
    def is_losing(self) -> bool:
        """By more than luck explains; twice that where little was seen and it has not lost before."""
        if self.steps < CLEAR_PROOF:
            return False
        is_likely = self.steps >= PROOF or self.losses > 0
        return self.gain + (1 if is_likely else 2) * self.error < 1.0

    @property
    def looks_after(self) -> int:
        """Steps of speculation after which plain steps are looked at: soon at first, when the pace is not typical."""
        if self.gain > CLEAR:
            return LOOK_AGAIN
        at_most = LOOK_AGAIN_SOON if abs(self.gain - 1) < CLOSE else LOOK_AGAIN
        return min(SECOND_LOOK << min(self.looks - 1, 5), at_most)

    @property
    def pause(self) -> int:
        """Steps to leave it off for, so that what its trial has cost comes to its price over them.

        Twice as long each time that it loses again: it is less and less likely to have come to pay, and a trial costs
        more than its steps show, for drafters have to read what they missed.
        """
        lost = min(self.steps, 1 / MEMORY) * (1 - self.gain)  # in plain steps
        return int(min(max(lost / PRICE, LEAST_PAUSE) * 2**self.losses, LONGEST_PAUSE))


class SpeculationGate:
    """By the number of sessions at once, in octaves."""

    def __init__(self) -> None:
        self._loads: dict[int, _AtLoad] = {}

    def is_on(self, sessions: int) -> bool:
        """Whether drafts are to be asked for."""
        return self._at(sessions).off_for == 0

    def gain(self, sessions: int) -> float:
        """Throughput with speculation over that of plain decoding; 1 while nothing is known."""
        return self._at(sessions).gain

    def plain_step(self, sessions: int) -> None:
        """A step was made without, though there were requests for it."""
        at = self._at(sessions)
        at.off_for = max(0, at.off_for - 1)

    def step(self, sessions: int, tokens: float, plain_tokens: float) -> None:
        """A step with speculation brought `tokens`; plain decoding would have brought `plain_tokens` meanwhile."""
        at = self._at(sessions)
        at.steps += 1
        if at.looks == 0:
            if at.steps == FIRST_LOOK:
                self._look(at)
            return
        at.add(tokens, plain_tokens)
        if at.is_losing and at.looks < ENOUGH_LOOKS:
            self._loads[octave(sessions)] = anew = _AtLoad(looks=at.looks)
            self._look(anew)
        elif at.is_losing:
            losses = min(at.losses + 1, MOST_LOSSES)
            self._loads[octave(sessions)] = _AtLoad(looks=at.looks, off_for=at.pause, losses=losses)
        elif at.steps >= at.looks_after:
            if at.steps >= LOOK_AGAIN_SOON:
                at.losses = 0
            self._look(at)

    def _look(self, at: _AtLoad) -> None:
        at.off_for = LOOK_STEPS
        at.steps = 0
        at.looks = at.looks + 1

    def _at(self, sessions: int) -> _AtLoad:
        load = octave(sessions)
        if load not in self._loads:
            self._loads[load] = _AtLoad()
        return self._loads[load]
