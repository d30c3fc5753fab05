"""Whether speculation is on: by what it has brought in fact, at each load, and what may be spent on finding out.

Pacing reckons with costs that it knows; what it does not know of (drafters that share memory, cores or network with the
target) shows only in what comes out. So where speculation was slower than plain decoding it is left off for a while,
however well it should have paid. Everything that is tried though it should not pay is tried at one price.
"""

from collections import defaultdict
from dataclasses import dataclass

from cluster.pacing.smoothing import Pairs

PRICE = 0.01  # of the time, about, is lost by trying what loses, and by plain steps where speculation wins
MEMORY = 0.02  # weight of the latest step: some fifty show a gain of 1.25 though single steps differ by 0.8
LEAST_DOUBT = 0.5  # of the error, which stays with a full memory: without any, a gain of 5 % was left off too often
PROOF = 12  # steps, decayed, before a loss is believed: a short benchmark at 16 sessions is a hundred steps
LOOK_STEPS = 8  # plain ones that are made now and then, to see what they cost by now; first after as many others
ENOUGH_LOOKS = 2  # without which nothing is a loss: eight lucky plain steps had left it off for half of a run
LONGEST_PAUSE = 8192  # steps: minutes, after which whoever drafts, or the load, may be another


def octave(count: int) -> int:
    """Which power of two it is nearest to: 3 to 5, 6 to 11, 12 to 22 are alike."""
    return (count * count).bit_length() // 2


@dataclass(slots=True)
class _AtLoad:
    """What is known of one load."""

    brought: Pairs = Pairs()  # seconds that steps took, and those that plain decoding takes for as much
    steps: int = 0  # since plain ones were last made
    looks: int = 0  # at what plain steps cost
    off_for: int = 0  # steps that are still to be made without
    pause: int = 0  # for which it was left off last; 0: it has not lost of late

    @property
    def best_gain(self) -> float:
        """As far as luck may have hidden it, and twice as far if it has not lost before.

        The more of the memory is filled, the less is left to luck: or a loss of 4 %, which is about the error of fifty
        steps, went on for a third of six hundred.
        """
        errors = (1 if self.pause else 2) * max(LEAST_DOUBT, 1 - MEMORY * self.brought.weight)
        return self.brought.ratio + errors * self.brought.ratio_error

    @property
    def is_losing(self) -> bool:
        return self.looks >= ENOUGH_LOOKS and self.brought.weight >= PROOF and self.best_gain < 1.0

    @property
    def looks_after(self) -> float:
        """Steps of speculation after which plain steps are looked at, so that what looks cost comes to the price.

        That is what speculation would have brought more: a close call is looked at often, and what seems to lose at
        once. At first looks come sooner, for the pace of the first steps is not typical.
        """
        spared = min(float(LOOK_STEPS) ** min(self.looks, 3), 1 / PRICE)
        return max(LOOK_STEPS, LOOK_STEPS * (self.best_gain - 1) * spared)

    @property
    def next_pause(self) -> int:
        """Steps to leave it off for, so that what its trial has cost comes to its price over them.

        Twice as long each time that it loses again: it is less and less likely to have come to pay, and a trial costs
        several percent more than its steps show, for drafters have to read what they missed.
        """
        lost = self.brought.weight * (1 - self.brought.ratio)  # in plain steps
        return int(min(max(lost / PRICE, 2 * self.pause, LOOK_STEPS), LONGEST_PAUSE))

    def rest(self, steps: int) -> None:
        """So many plain steps are made, which show what they cost by now."""
        self.off_for = steps
        self.steps = 0
        self.looks += 1


class SpeculationGate:
    """Loads are told apart by the number of sessions at once, in octaves; trials of single sessions are not."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _AtLoad] = defaultdict(_AtLoad)
        self._owed = 0.0  # rounds of any sessions that are still to pay for the latest trial

    def is_on(self, sessions: int) -> bool:
        """Whether drafts are to be asked for."""
        return self._at(sessions).off_for == 0

    def gain(self, sessions: int) -> float:
        """Throughput with speculation over that of plain decoding; 1 while nothing is known."""
        return self._at(sessions).brought.ratio

    @property
    def may_try(self) -> bool:
        """Whether a session may begin to ask for blocks that should not pay."""
        return self._owed <= 0

    def round(self, sessions: int, is_trial: bool) -> None:
        """One of so many sessions was decided about. Its trial costs all of them: their step waits, and is longer."""
        self._owed = max(0.0, self._owed - 1) + is_trial * sessions / PRICE

    def plain_step(self, sessions: int) -> None:
        """A step was made without, though there were requests for it."""
        at = self._at(sessions)
        at.off_for = max(0, at.off_for - 1)

    def step(self, sessions: int, plain_s: float, seconds: float) -> None:
        """A step with speculation took `seconds`; plain decoding takes `plain_s` for what it did."""
        at = self._at(sessions)
        at.steps += 1
        if at.looks:
            at.brought = at.brought.after(seconds, plain_s, MEMORY)
        if at.is_losing:
            at.pause = at.next_pause
            at.brought = Pairs()
            at.rest(at.pause)
        elif at.steps >= at.looks_after:
            if at.looks < ENOUGH_LOOKS:
                at.brought = Pairs()
            if at.brought.weight >= PROOF:
                at.pause //= 2  # it has not lost
            at.rest(LOOK_STEPS)

    def _at(self, sessions: int) -> _AtLoad:
        return self._loads[octave(sessions)]
