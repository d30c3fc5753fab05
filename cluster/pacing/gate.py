"""Whether speculation is on: by what it has brought in fact, at each load, and what may be spent on finding out.

Pacing reckons with costs that it knows; what it does not know of (drafters that share memory, cores or network with the
target) shows only in what comes out. So where speculation was slower than plain decoding it is left off for a while,
however well it should have paid. Everything that is tried though it should not pay is tried at one price.
"""

from dataclasses import dataclass

from cluster.pacing.smoothing import Pairs
from cluster.pacing.step_cost import octave

PRICE = 0.01  # of the time, about, is lost by trying what loses
MEMORY = 0.02  # weight of the latest step: some fifty show a gain of 1.25 though single steps differ by 0.8
PROOF = 48  # steps before anything is concluded
CLEAR_PROOF = 16  # the same where it is beyond doubt: a short benchmark at 16 sessions is a hundred steps
LOOK_STEPS = 8  # plain ones that are made now and then, to see what they cost by now; first after as many others
ENOUGH_LOOKS = 2  # without which nothing is a loss: eight lucky plain steps had left it off for half of a run
LOOK_AGAIN = 1024  # steps of speculation between two looks at most: eight in a thousand cost next to nothing
CLOSE = 0.2  # gains less than this above or below 1 are looked at eight times as often
CLEAR = 2.0  # a gain that misjudged plain steps do not explain
LONGEST_PAUSE = 8192  # steps: minutes, after which whoever drafts, or the load, may be another
TRIAL_ROUNDS = 2  # that a session's trial takes, unless something is accepted: the first may meet a drafter not ready


@dataclass(slots=True)
class _AtLoad:
    """What is known of one load."""

    brought: Pairs = Pairs()  # tokens that plain decoding would have brought meanwhile, and those of steps
    steps: int = 0  # since it was last taken up
    looks: int = 0  # at what plain steps cost
    off_for: int = 0  # steps that are still to be made without
    pause: int = 0  # for which it was left off last; 0: it has not lost of late

    @property
    def gain(self) -> float:
        return self.brought.ratio

    @property
    def is_losing(self) -> bool:
        """By more than luck explains; twice that where little was seen and it has not lost before."""
        if self.steps < CLEAR_PROOF:
            return False
        is_likely = self.steps >= PROOF or self.pause > 0
        return self.gain + (1 if is_likely else 2) * self.brought.ratio_error < 1.0

    @property
    def looks_after(self) -> int:
        """Steps of speculation after which plain steps are looked at: soon at first, when the pace is not typical."""
        if self.gain > CLEAR:
            return LOOK_AGAIN
        at_most = LOOK_AGAIN // 8 if abs(self.gain - 1) < CLOSE else LOOK_AGAIN
        return min(LOOK_STEPS << min(self.looks + 1, 7), at_most)

    @property
    def next_pause(self) -> int:
        """Steps to leave it off for, so that what its trial has cost comes to its price over them.

        Twice as long each time that it loses again: it is less and less likely to have come to pay, and a trial costs
        several percent more than its steps show, for drafters have to read what they missed.
        """
        lost = min(self.steps, 1 / MEMORY) * (1 - self.gain)  # in plain steps
        return int(min(max(lost / PRICE, 2 * self.pause, LOOK_STEPS), LONGEST_PAUSE))


class SpeculationGate:
    """Loads are told apart by the number of sessions at once, in octaves; trials of single sessions are not."""

    def __init__(self) -> None:
        self._loads: dict[int, _AtLoad] = {}
        self._owed = 0.0  # rounds of any sessions that are still to pay for the latest trials

    def is_on(self, sessions: int) -> bool:
        """Whether drafts are to be asked for."""
        return self._at(sessions).off_for == 0

    def gain(self, sessions: int) -> float:
        """Throughput with speculation over that of plain decoding; 1 while nothing is known."""
        return self._at(sessions).gain

    def may_try(self, trial_rounds: int) -> bool:
        """Whether a session may ask for a block that should not pay; its trial has had so many rounds."""
        return trial_rounds < TRIAL_ROUNDS if trial_rounds else self._owed <= 0

    def round(self, is_trial: bool) -> None:
        """A session was decided about: of all sessions few try what does not pay, for all share what trials cost."""
        self._owed = max(0.0, self._owed - 1) + is_trial / PRICE

    def plain_step(self, sessions: int) -> None:
        """A step was made without, though there were requests for it."""
        at = self._at(sessions)
        at.off_for = max(0, at.off_for - 1)

    def step(self, sessions: int, tokens: float, plain_tokens: float) -> None:
        """A step with speculation brought `tokens`; plain decoding would have brought `plain_tokens` meanwhile."""
        at = self._at(sessions)
        at.steps += 1
        if at.looks == 0:
            if at.steps == LOOK_STEPS:
                self._look(at)
            return
        at.brought = at.brought.after(plain_tokens, tokens, MEMORY)
        if at.is_losing and at.looks < ENOUGH_LOOKS:
            at.brought = Pairs()
            self._look(at)
        elif at.is_losing:
            pause = at.next_pause
            self._loads[octave(sessions)] = _AtLoad(looks=at.looks, off_for=pause, pause=pause)
        elif at.steps >= at.looks_after:
            if at.steps >= LOOK_AGAIN // 8:
                at.pause = 0
            self._look(at)

    def _look(self, at: _AtLoad) -> None:
        at.off_for = LOOK_STEPS
        at.steps = 0
        at.looks += 1

    def _at(self, sessions: int) -> _AtLoad:
        load = octave(sessions)
        if load not in self._loads:
            self._loads[load] = _AtLoad()
        return self._loads[load]
