"""Circuit breakers for drafters: when to stop counting on one, and when to try it again.

A target notices silence first, step by step, and stops waiting; that is cheap to be wrong about. A router moves
sessions, which costs a drafter their prompts again, and so takes its time. Knows nothing of streams or of clocks:
times are handed in.
"""

from collections.abc import Iterable

from protos.messages import DraftAnswer

TRIP_STEPS = 3  # steps in a row without any block that was asked for
FIRST_PROBE_STEPS = 32  # after so many a silent drafter is waited for once more; doubles
TRIP_MISSES = 8  # blocks in a row that a router sees missed
SILENT_S = 2.0  # for so long, of a drafter that drafted for the session before
FIRST_BLOCK_S = 10.0  # the same of one that has yet to read the session's prompt
FIRST_PAUSE_S = 1.0  # before a drafter is tried again; doubles while it is in vain
LONGEST_PAUSE_S = 30.0


class SilentDrafters:
    """A target's breakers, one for each drafter: steps in a row that went on without a block it owed."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}  # by drafter; none while it answers

    def missed(self, drafters: Iterable[str]) -> None:
        """In the step just made, these brought nothing of what they were asked for."""
        for drafter in drafters:
            self._steps[drafter] = self._steps.get(drafter, 0) + 1

    def heard(self, drafter: str) -> None:
        """It brought something, or is gone."""
        self._steps.pop(drafter, None)

    def is_silent(self, drafter: str) -> bool:
        """Whether nobody should wait for it as usual."""
        return self._steps.get(drafter, 0) >= TRIP_STEPS

    def is_probed(self, drafter: str) -> bool:
        """Whether a silent one is waited for in this step: after 32 steps, 64, 128 and so on."""
        steps = self._steps.get(drafter, 0)
        return steps >= FIRST_PROBE_STEPS and steps & (steps - 1) == 0


class Breaker:
    """A router's breaker for one drafter.

    Closed, it lets sessions through. It opens when blocks are missed for too long or the drafter says that it is
    overloaded. After a pause one session goes through as a probe: a block for it closes the breaker, silence opens it
    for longer. A drafter that was silent and has any block again is trusted at once.
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

    def missed(self, now: float, has_drafted: bool) -> bool:
        """A block was missed, by a session that it `has_drafted` for before or not; True: the breaker opens now."""
        if self._misses == 0:
            self._silent_since = now
        self._misses += 1
        limit_s = SILENT_S if has_drafted else FIRST_BLOCK_S
        if self._misses < TRIP_MISSES or now - self._silent_since < limit_s:
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


class Breakers:
    """All breakers of a router, by drafter's address; one that never failed has none."""

    def __init__(self) -> None:
        self._breakers: dict[str, Breaker] = {}

    def takes(self, address: str, now: float) -> bool:
        """Whether a session may be given to the drafter."""
        breaker = self._breakers.get(address)
        return breaker is None or breaker.takes(now)

    def placed(self, address: str, session: str, now: float) -> None:
        """A session was given to it."""
        if breaker := self._breakers.get(address):
            breaker.placed(session, now)

    def note(self, address: str, session: str, answer: DraftAnswer, has_drafted: bool, now: float) -> bool:
        """What came of a block; True: the drafter is given up as silent now, its sessions are to be moved."""
        if answer is DraftAnswer.MISSED:
            return self._breakers.setdefault(address, Breaker()).missed(now, has_drafted)
        if answer is DraftAnswer.GIVEN and (breaker := self._breakers.get(address)):
            breaker.answered(session)
        return False

    def refused(self, address: str, now: float) -> None:
        """The drafter says that it is overloaded."""
        self._breakers.setdefault(address, Breaker()).refused(now)

    def forget(self, address: str) -> None:
        """The stream broke: who comes back is trusted."""
        self._breakers.pop(address, None)
