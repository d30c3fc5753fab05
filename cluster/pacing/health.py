"""Whether a drafter is to be counted on: circuit breakers, for silence and for sessions whose blocks became bad.

A target notices silence first, step by step, and stops waiting; that is cheap to be wrong about. A router moves
sessions, which costs a drafter their prompts again, and so takes its time, which is handed in.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from protos.messages import DraftAnswer

SILENT_STEPS = 3  # without what was asked for, after which a target waits no more: single late blocks are nothing
PROBE_AFTER = 32  # steps until it waits once again, then twice as many, and so on: a dead drafter costs next to nothing
MISSES = 8  # of a drafter's blocks, before which a router moves no session: it would read their prompts again
COLLAPSES = 3  # sessions whose blocks became bad, with none between that ended well, before a drafter is given up
FIRST_PAUSE_S = 1.0  # before a router tries a drafter again; doubles while it is in vain
LONGEST_PAUSE_S = 30.0
SILENT_S = 2.0  # for which a router hears nothing of a drafter that drafted for the session before
FIRST_BLOCK_S = 10.0  # the same of one that has yet to read the session's prompt


class Breaker:
    """A router's, for one drafter.

    Closed, it is counted on. It opens when blocks are missed for too long or the drafter says that it is overloaded.
    After a pause it is half-open, and one session goes through as a probe: a block for it closes the breaker, silence
    opens it for longer. A drafter that was silent and has any block again is trusted at once. One whose blocks became
    bad in one session after the other has blocks all the while: it takes a session that ends well.
    """

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S  # of the next opening
        self._open_until: float | None = None  # half-open after that; None: closed
        self._was_silent = False  # why it is open
        self._was_bad = False
        self._probe: str | None = None  # the session that goes through while it is half-open
        self._probe_until = 0.0
        self._misses = 0  # since a block was last in time
        self._silent_since = 0.0  # first of them
        self._collapses = 0  # sessions whose blocks became bad, since one ended well

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
        if not self._was_bad and (session == self._probe or self._was_silent):
            self._close()

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

    def collapsed(self, now: float) -> bool:
        """Its blocks became bad in a session that it had begun anew; True: the breaker opens now."""
        self._collapses += 1
        if self._collapses < COLLAPSES:
            return False
        self._open(now)
        self._was_bad = True
        return True

    def ended_well(self) -> None:
        """A session is over that it drafted well for to the end."""
        self._collapses = 0
        if self._was_bad:
            self._close()

    def refused(self, now: float) -> None:
        """The drafter says that it is overloaded."""
        self._open(now)

    def _close(self) -> None:
        self._open_until = None
        self._probe = None
        self._was_silent = False
        self._was_bad = False
        self._pause_s = max(FIRST_PAUSE_S, self._pause_s / 2)

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
        self.opened: Counter[tuple[str, str]] = Counter()  # by address and cause
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
            opens = self._breakers[address].missed(now, SILENT_S if has_drafted else FIRST_BLOCK_S)
            self.opened[address, "silent"] += opens
            return opens
        if answer is DraftAnswer.GIVEN:
            self._breakers[address].answered(session)
        return False

    def refused(self, address: str, now: float) -> None:
        """The drafter says that it is overloaded."""
        self.opened[address, "overloaded"] += self._breakers[address].takes(now)
        self._breakers[address].refused(now)

    def collapsed(self, address: str, now: float) -> bool:
        """Its blocks became bad in a session that it had begun anew; True: it is given up now."""
        opens = self._breakers[address].collapsed(now)
        self.opened[address, "bad"] += opens
        return opens

    def are_open(self, now: float) -> dict[str, bool]:
        """By address, whether no session is given to the drafter."""
        return {address: not breaker.takes(now) for address, breaker in dict(self._breakers).items()}

    def ended_well(self, address: str) -> None:
        """A session is over that it drafted well for to the end."""
        self._breakers[address].ended_well()

    def forget(self, address: str) -> None:
        """The stream broke: who comes back is trusted."""
        self._breakers.pop(address, None)
