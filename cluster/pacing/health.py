"""Whether a drafter is to be counted on: circuit breakers for silence, an alarm for blocks that have become bad.

A target notices silence first, step by step, and stops waiting; that is cheap to be wrong about. A router moves
sessions, which costs a drafter their prompts again, and so takes its time, which is handed in.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from cluster.pacing.smoothing import Mean
from protos.messages import DraftAnswer
from protos.values import value

SILENT_STEPS = 3  # without what was asked for, after which a target waits no more: single late blocks are nothing
PROBE_AFTER = 32  # steps until it waits once again, then twice as many, and so on: a dead drafter costs next to nothing
MISSES = 8  # of a drafter's blocks, before which a router moves no session: it would read their prompts again
FIRST_PAUSE_S = 1.0  # before a router tries a drafter again; doubles while it is in vain
LONGEST_PAUSE_S = 30.0
SILENT_S = 2.0  # for which a router hears nothing of a drafter that drafted for the session before
FIRST_BLOCK_S = 10.0  # the same of one that has yet to read the session's prompt

ALARM = 1e-4  # false alarms a block, at most: each costs reading the session again
PROOF = 8  # blocks that must have been good before, or there is no history to fall short of
HISTORY = 128  # blocks, about, from which it is known what is usual
POOR = 0.25  # usual acceptance below which there is nothing to fall from: a draft that was always poor raises no alarm
HARDER = 0.85  # of the usual acceptance: what texts that become harder are granted
COLLAPSED = 0.15  # of that: what is left to a drafter that is out of step, for some of what it names is right by luck


class Breaker:
    """A router's, for one drafter.

    Closed, it is counted on. It opens when blocks are missed for too long or the drafter says that it is overloaded.
    After a pause it is half-open, and one session goes through as a probe: a block for it closes the breaker, silence
    opens it for longer. A drafter that was silent and has any block again is trusted at once.
    """

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S  # of the next opening
        self._open_until: float | None = None  # half-open after that; None: closed
        self._was_silent = False  # why it is open
        self._probe: str | None = None  # the session that goes through while it is half-open
        self._probe_until = 0.0
        self._misses = 0  # since a block was last in time
        self._silent_since = 0.0  # first of them

    def takes(self, now: float) -> bool:
        """Whether a session may be given to the drafter."""
        if self._open_until is None:
            return True
        return now >= self._open_until and (self._probe is None or now >= self._probe_until)

    def placed(self, session: str, now: float) -> None:
        """A session was given to it."""
        if self._open_until is not None:
            self._probe = session
            self._probe_until = now + FIRST_BLOCK_S

    def answered(self, session: str) -> None:
        """A block was there in time, or the drafter said that it has none."""
        self._misses = 0
        if session == self._probe or self._was_silent:
            self._open_until = None
            self._probe = None
            self._was_silent = False
            self._pause_s = max(FIRST_PAUSE_S, self._pause_s / 2)

    def missed(self, now: float, silence_s: float) -> bool:
        """A block was missed; True: the breaker opens now, for none was in time for so long."""
        if self._misses == 0:
            self._silent_since = now
        self._misses += 1
        if self._misses < MISSES or now - self._silent_since < silence_s:
            return False
        self._open(now)
        self._was_silent = True
        return True

    def refused(self, now: float) -> None:
        """The drafter says that it is overloaded."""
        self._open(now)

    def _open(self, now: float) -> None:
        """Lets nobody through for a while."""
        self._misses = 0
        if self._open_until is None or now >= self._open_until:  # further refusals of one moment count once
            self._open_until = now + self._pause_s
            self._probe = None
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


class SilentDrafters:
    """Whom a target does not wait for: who brought nothing of what was asked for, step after step."""

    def __init__(self) -> None:
        self._missed: Counter[str] = Counter()  # steps in a row, by drafter

    def missed(self, drafters: Iterable[str]) -> None:
        """In the step just made, these brought nothing of what they were asked for."""
        self._missed.update(drafters)

    def heard(self, drafter: str) -> None:
        """It brought something, or is gone."""
        self._missed.pop(drafter, None)

    def is_silent(self, drafter: str) -> bool:
        """Whether nobody should wait for it as usual."""
        return self._missed[drafter] >= SILENT_STEPS

    def is_probed(self, drafter: str) -> bool:
        """Whether a silent one is waited for in this step."""
        steps, rest = divmod(self._missed[drafter] - SILENT_STEPS + 1, PROBE_AFTER)
        return rest == 0 and (steps + 1).bit_count() == 1 and self.is_silent(drafter)


class Breakers:
    """All breakers of a router, by drafter's address."""

    def __init__(self) -> None:
        self._breakers: defaultdict[str, Breaker] = defaultdict(Breaker)

    def takes(self, address: str, now: float) -> bool:
        """Whether a session may be given to the drafter."""
        return self._breakers[address].takes(now)

    def placed(self, address: str, session: str, now: float) -> None:
        """A session was given to it."""
        self._breakers[address].placed(session, now)

    def note(self, address: str, session: str, answer: DraftAnswer, has_drafted: bool, now: float) -> bool:
        """What came of a block, of a session that it `has_drafted` for before or not.

        True: the drafter is given up as silent now, and its sessions are to be moved.
        """
        if answer is DraftAnswer.MISSED:
            return self._breakers[address].missed(now, SILENT_S if has_drafted else FIRST_BLOCK_S)
        if answer is DraftAnswer.GIVEN:
            self._breakers[address].answered(session)
        return False

    def refused(self, address: str, now: float) -> None:
        """The drafter says that it is overloaded."""
        self._breakers[address].refused(now)

    def forget(self, address: str) -> None:
        """The stream broke: who comes back is trusted."""
        self._breakers.pop(address, None)


@value
class AcceptanceDrift:
    """Whether a drafter's blocks are as good as they were: Page's CUSUM test against the session's own history.

    A block is good if anything of it was accepted. `evidence` is the logarithm of how much likelier the latest blocks
    are if blocks are good COLLAPSED * HARDER as often as usual than if HARDER as often; it never falls below 0. At
    -log(ALARM) a collapse is concluded. If it were known exactly what is usual, there would be 1 / ALARM blocks or more
    on average before a false alarm, as long as blocks are good at least HARDER as often (Lorden 1971). It is estimated;
    simulated sessions keep to that rate at every constant acceptance: 0.2 comes closest, with 9e-5 alarms a block in
    the first hundred, and from 0.8 on there is less than one in a million. A fall from 0.8 to 0.1 is found after 12
    blocks, one to 0.2 after 17 (medians).
    """

    history: Mean = Mean()  # share of good blocks
    evidence: float = 0.0

    @property
    def is_collapsed(self) -> bool:
        """Blocks are good so much more seldom than before that the drafter's state must be wrong."""
        return self.evidence >= -math.log(ALARM)

    def after(self, accepted: int) -> "AcceptanceDrift":
        """A block was verified. While there is evidence it is no part of the history: a collapse is not usual."""
        good = accepted > 0
        history = self.history if self.evidence else self.history.after(good, 1 / HISTORY)
        return AcceptanceDrift(history, self._evidence_after(good))

    def _evidence_after(self, good: bool) -> float:
        blocks = min(self.history.count, HISTORY)
        proven = blocks * self.history.value
        usual = (proven + 0.5) / (blocks + 1)
        if proven < PROOF or usual < POOR:
            return 0.0
        if good:
            return max(0.0, self.evidence + math.log(COLLAPSED))
        harder = HARDER * usual
        return self.evidence + math.log((1 - COLLAPSED * harder) / (1 - harder))
