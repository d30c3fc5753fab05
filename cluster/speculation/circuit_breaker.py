"""Circuit breakers for silent, overloaded and bad drafters.

A target notices silence within a few steps and stops waiting; a false alarm there is cheap. A router waits longer
before it moves sessions, because each move costs the new drafter a prefill. Callers pass times in.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from protos.messages import DraftAnswer

SILENT_STEPS = 3  # consecutive missed steps after which a target stops waiting; single late blocks prove nothing
PROBE_STEPS = 32  # steps until the first probe; doubles after each, so a dead drafter costs little
MAX_MISSES = 8  # consecutive missed blocks before a router moves sessions
MAX_COLLAPSES = 3  # consecutive collapsed sessions before a drafter is given up
FULL_PAUSE_S = 0.5  # pause after a full drafter refused a session; its other sessions may end at any time
FIRST_PAUSE_S = 1.0  # pause before a router retries a silent or bad drafter; doubles after each failed retry
MAX_PAUSE_S = 30.0
MAX_SILENT_PAUSE_S = 4.0  # the same after silence, because a busy machine may become quiet at any time
SILENT_S = 2.0  # silence after which a drafter is given up if it has drafted for the session
FIRST_BLOCK_S = 10.0  # the same limit while the drafter may still be prefilling the session's prompt


class CircuitBreaker:
    """A router's circuit breaker for one drafter.

    A closed breaker lets sessions through. The breaker opens when the drafter is silent for too long, is full and
    refuses a session, or has several collapsed sessions. After a pause it is half-open and passes one session as a
    probe: a block closes the breaker, silence reopens it for longer. After silence, any block closes the breaker. After
    collapses, only a session that ends with good acceptance closes it, because a bad drafter keeps sending blocks. A
    full drafter is healthy: its pauses stay short, and each passes one more session.
    """

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S  # next pause
        self._open_until: float | None = None  # end of the pause, when the breaker becomes half-open; None: closed
        self._was_silent = False  # True if the breaker opened because of silence
        self._was_bad = False
        self._was_full = False
        self._probe: str | None = None  # probe session in the half-open state
        self._probe_until = 0.0
        self._misses = 0  # number of misses since the last block in time
        self._silent_since = 0.0  # time of the first miss
        self._collapses = 0  # number of collapsed sessions since a good session

    def takes(self, now: float) -> bool:
        """Returns True if the drafter may get a session."""
        if self._open_until is None:
            return True
        return now >= self._open_until and (self._probe is None or now >= self._probe_until)

    def placed(self, session: str, now: float) -> None:
        """Records an assignment; in the half-open state, the session becomes the probe."""
        if self._open_until is not None:
            self._probe = session
            self._probe_until = now + (FULL_PAUSE_S if self._was_full else FIRST_BLOCK_S)

    def answered(self, session: str) -> None:
        """Records a block or NoDraft that arrived in time."""
        self._misses = 0
        if not self._was_bad and (session == self._probe or self._was_silent):
            self._close()

    def missed(self, now: float, silence_s: float) -> bool:
        """Records a missed block.

        Returns True if the breaker opens now because no block has arrived in time for `silence_s` seconds.
        """
        if self._misses == 0:
            self._silent_since = now
        self._misses += 1
        if self._misses < MAX_MISSES or now - self._silent_since < silence_s:
            return False
        self._open(now)
        self._pause_s = min(self._pause_s, MAX_SILENT_PAUSE_S)
        self._was_silent = True
        return True

    def collapsed(self, now: float) -> bool:
        """Records a collapse in a session that was already resynchronized; returns True if the breaker opens now."""
        self._collapses += 1
        if self._collapses < MAX_COLLAPSES:
            return False
        self._open(now)
        self._was_bad = True
        return True

    def ended_well(self) -> None:
        """Records a session that ended with good acceptance of the drafter's blocks."""
        self._collapses = 0
        if self._was_bad:
            self._close()

    def refused(self, now: float) -> None:
        """Opens the breaker after a full drafter has refused a session."""
        self._misses = 0
        if self._open_until is None or self._was_full:
            self._open_until = now + FULL_PAUSE_S
            self._probe = None
            self._was_full = True
        else:
            self._open(now)

    def _close(self) -> None:
        self._open_until = None
        self._probe = None
        self._was_silent = False
        self._was_bad = False
        self._was_full = False
        self._pause_s = max(FIRST_PAUSE_S, self._pause_s / 2)

    def _open(self, now: float) -> None:
        """Opens the breaker and starts a pause."""
        self._misses = 0
        # Events during a pause do not extend it.
        if self._open_until is None or self._was_full or now >= self._open_until:
            self._open_until = now + self._pause_s
            self._probe = None
            self._was_full = False
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)


class SilentDrafters:
    """Tracks drafters that a target no longer waits for after several consecutive unanswered requests."""

    def __init__(self) -> None:
        self._missed: Counter[str] = Counter()  # consecutive missed steps, by drafter

    def missed(self, drafters: Iterable[str]) -> None:
        """Records that these drafters did not answer a request for the latest step."""
        self._missed.update(drafters)

    def on_message(self, drafter: str) -> None:
        """Records a drafter's message, or the loss of its stream."""
        self._missed.pop(drafter, None)

    def is_silent(self, drafter: str) -> bool:
        """Returns True if the target should wait for the drafter only as a probe."""
        return self._missed[drafter] >= SILENT_STEPS

    def is_probed(self, drafter: str) -> bool:
        """Returns True if the current step probes a silent drafter."""
        steps, rest = divmod(self._missed[drafter] - SILENT_STEPS + 1, PROBE_STEPS)
        return rest == 0 and (steps + 1).bit_count() == 1 and self.is_silent(drafter)


class CircuitBreakers:
    """A router's circuit breakers, by drafter address."""

    def __init__(self) -> None:
        self.opened: Counter[tuple[str, str]] = Counter()  # number of openings, by (address, cause)
        self._breakers: defaultdict[str, CircuitBreaker] = defaultdict(CircuitBreaker)

    def takes(self, address: str, now: float) -> bool:
        """Returns True if the drafter may get a session."""
        return self._breakers[address].takes(now)

    def placed(self, address: str, session: str, now: float) -> None:
        """Records the assignment of a session to the drafter."""
        self._breakers[address].placed(session, now)

    def note(self, address: str, session: str, answer: DraftAnswer, has_drafted: bool, now: float) -> bool:
        """Records the outcome of a draft request; `has_drafted` is False before the drafter's first answer in this
        session.

        Returns True if the drafter is given up as silent now; the router must then move its sessions.
        """
        if answer is DraftAnswer.MISSED:
            opens = self._breakers[address].missed(now, SILENT_S if has_drafted else FIRST_BLOCK_S)
            self.opened[address, "silent"] += opens
            return opens
        if answer is DraftAnswer.GIVEN:
            self._breakers[address].answered(session)
        return False

    def refused(self, address: str, now: float) -> None:
        """Records a drafter's report of overload."""
        self.opened[address, "overloaded"] += self._breakers[address].takes(now)
        self._breakers[address].refused(now)

    def collapsed(self, address: str, now: float) -> bool:
        """Records a collapse in a session that was already resynchronized.

        Returns True if this call gives up the drafter.
        """
        opens = self._breakers[address].collapsed(now)
        self.opened[address, "bad"] += opens
        return opens

    def are_open(self, now: float) -> dict[str, bool]:
        """Returns, by address, True if the drafter gets no sessions now."""
        return {address: not breaker.takes(now) for address, breaker in dict(self._breakers).items()}

    def ended_well(self, address: str) -> None:
        """Records a session that ended with good acceptance of the drafter's blocks."""
        self._breakers[address].ended_well()

    def forget(self, address: str) -> None:
        """Drops the breaker of a lost drafter; a reconnected drafter starts with a closed breaker."""
        self._breakers.pop(address, None)
