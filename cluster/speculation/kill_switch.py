"""The speculation gate: turns speculation off where it was measured to lose, and limits the cost of trying it again.

Pacing decides from known costs. Unknown costs, such as drafters that share memory, cores or network with the target,
show only in the measured throughput. Where speculation was slower than non-speculative decoding at a load, it is off
for a while, even if it should have paid. Everything that is tried against the odds is charged to one budget, `PRICE`.
"""

from collections import defaultdict
from dataclasses import dataclass

from cluster.speculation.ewma import Pairs

PRICE = 0.01  # share of the time, about, lost to trials that lose and to non-speculative steps where speculation wins
MEMORY = 0.02  # weight of the latest step: about fifty show a gain of 1.25 although single steps differ by 0.8
LEAST_DOUBT = 0.5  # share of the error kept at a full memory: without it, a gain of 5 % was turned off too often
PROOF = 12  # decayed steps before a loss is accepted: a short benchmark at 16 sessions has a hundred steps
LOOK_STEPS = 8  # non-speculative steps of one look at their current cost; the first look follows as many others
ENOUGH_LOOKS = 2  # looks before a loss is accepted: eight lucky steps once turned speculation off for half a run
LONGEST_PAUSE = 8192  # steps, some minutes: after that the drafters or the load may have changed


def octave(count: int) -> int:
    """Returns log2 of `count`, rounded to the nearest integer: 3 to 5, 6 to 11 and 12 to 22 are equal."""
    return (count * count).bit_length() // 2


@dataclass(slots=True)
class _AtLoad:
    """Measurements at one load."""

    brought: Pairs = Pairs()  # seconds of steps, and of non-speculative decoding for the same tokens
    steps: int = 0  # since the last look
    looks: int = 0  # at the cost of non-speculative steps
    off_for: int = 0  # remaining steps to make without speculation
    pause: int = 0  # steps of the latest pause; 0: no recent loss

    @property
    def best_gain(self) -> float:
        """Upper estimate of the gain: the measured gain plus its error, or twice its error without a recent loss.

        The margin shrinks as the memory fills. With a fixed margin, a loss of 4 %, about the error of fifty steps,
        persisted for a third of six hundred steps.
        """
        errors = (1 if self.pause else 2) * max(LEAST_DOUBT, 1 - MEMORY * self.brought.weight)
        return self.brought.ratio + errors * self.brought.ratio_error

    @property
    def is_losing(self) -> bool:
        return self.looks >= ENOUGH_LOOKS and self.brought.weight >= PROOF and self.best_gain < 1.0

    @property
    def looks_after(self) -> float:
        """Speculative steps before the next look at non-speculative ones, so that looks cost about `PRICE`.

        A look costs the gain that speculation would have brought. A close call is therefore looked at often, and an
        apparent loss at once. The first looks come sooner, because the pace of the first steps is not typical.
        """
        spared = min(float(LOOK_STEPS) ** min(self.looks, 3), 1 / PRICE)
        return max(LOOK_STEPS, LOOK_STEPS * (self.best_gain - 1) * spared)

    @property
    def next_pause(self) -> int:
        """Steps to leave speculation off, so that over them the cost of its trial comes to `PRICE`.

        The pause at least doubles each time speculation loses again. It is then less likely to have begun to pay, and a
        trial costs several percent more than its steps show, because drafters have to read what they missed.
        """
        lost = self.brought.weight * (1 - self.brought.ratio)  # in non-speculative steps
        return int(min(max(lost / PRICE, 2 * self.pause, LOOK_STEPS), LONGEST_PAUSE))

    def rest(self, steps: int) -> None:
        """Schedules `steps` non-speculative steps, which also measure the current cost of such steps."""
        self.off_for = steps
        self.steps = 0
        self.looks += 1


class SpeculationGate:
    """Gates speculation by load: the number of concurrent sessions, in octaves.

    Trials of single sessions share one budget.
    """

    def __init__(self) -> None:
        self._loads: defaultdict[int, _AtLoad] = defaultdict(_AtLoad)
        self._owed = 0.0  # rounds, of any sessions, until the latest trials are paid for

    def is_on(self, sessions: int) -> bool:
        """Returns True if drafts are to be requested at this load."""
        return self._at(sessions).off_for == 0

    def gain(self, sessions: int) -> float:
        """Returns speculative over non-speculative throughput; 1 while unknown."""
        return self._at(sessions).brought.ratio

    @property
    def may_try(self) -> bool:
        """True if a session may start a trial of blocks that should not pay."""
        return self._owed <= 0

    def round(self, sessions: int, is_trial: bool) -> None:
        """Records a decision about one of `sessions` sessions.

        A trial is charged to all of them, because their step waits and takes longer.
        """
        self._owed = max(0.0, self._owed - 1) + is_trial * sessions / PRICE

    def plain_step(self, sessions: int) -> None:
        """Records a step without drafts whose requests allowed them."""
        at = self._at(sessions)
        at.off_for = max(0, at.off_for - 1)

    def step(self, sessions: int, plain_s: float, seconds: float) -> None:
        """Records a speculative step of `seconds`; non-speculative decoding takes `plain_s` for the same tokens."""
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
