"""Circuit breakers for drafters that are silent or overloaded, or whose blocks became bad.

A target notices silence first, step by step, and stops waiting; a mistake there is cheap. A router moves sessions,
which costs the next drafter a prefill of their prompts, so it waits longer. Callers pass times in.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from protos.messages import DraftAnswer

SILENT_STEPS = 3  # missed steps in a row after which a target stops waiting: single late blocks prove nothing
PROBE_STEPS = 32  # steps until the target waits once more; doubles each time, so a dead drafter costs little
MAX_MISSES = 8  # missed blocks before a router moves sessions, whose prompts another drafter must read
MAX_COLLAPSES = 3  # sessions in a row whose blocks became bad before a drafter is given up
FIRST_PAUSE_S = 1.0  # pause before a router tries a drafter again; doubles with each failed try
MAX_PAUSE_S = 30.0
SILENT_S = 2.0  # silence after which a drafter that has drafted for the session is given up
FIRST_BLOCK_S = 10.0  # silence after which one that may still be reading the session's prompt is given up


class CircuitBreaker:
    """A router's circuit breaker for one drafter.

    While closed, the drafter is used. It opens when blocks are missed for too long, when the drafter reports overload,
    or when its blocks became bad in several sessions. After a pause it is half-open, and one session passes as a probe:
    a block for it closes the breaker, silence opens it for longer. A drafter that was silent is trusted again at its
    first block. One whose blocks became bad keeps sending blocks, so its breaker closes only when a session ends well.
    """

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S  # length of the next pause
        self._open_until: float | None = None  # end of the pause, after which the breaker is half-open; None: closed
        self._was_silent = False  # cause of the latest opening
        self._was_bad = False
        self._probe: str | None = None  # the session that passes in the half-open state
        self._probe_until = 0.0
        self._misses = 0  # since the last block in time
        self._silent_since = 0.0  # time of the first of these misses
        self._collapses = 0  # sessions whose blocks became bad since a session ended well

    def takes(self, now: float) -> bool:
        """Returns True if a session may be given to the drafter."""
        if self._open_until is None:
            return True
        return now >= self._open_until and (self._probe is None or now >= self._probe_until)

    def placed(self, session: str, now: float) -> None:
        """Records that a session was given to the drafter; in the half-open state it becomes the probe."""
        if self._open_until is not None:
            self._probe = session
            self._probe_until = now + FIRST_BLOCK_S

    def answered(self, session: str) -> None:
        """Records a block in time, or the drafter's answer that it has none."""
        self._misses = 0
        if not self._was_bad and (session == self._probe or self._was_silent):
            self._close()

    def missed(self, now: float, silence_s: float) -> bool:
        """Records a missed block.

        Returns True if the breaker opens now, because no block was in time for `silence_s` seconds.
        """
        if self._misses == 0:
            self._silent_since = now
        self._misses += 1
        if self._misses < MAX_MISSES or now - self._silent_since < silence_s:
            return False
        self._open(now)
        self._was_silent = True
        return True

    def collapsed(self, now: float) -> bool:
        """Records that blocks became bad in a session even after a resync; returns True if the breaker opens now."""
        self._collapses += 1
        if self._collapses < MAX_COLLAPSES:
            return False
        self._open(now)
        self._was_bad = True
        return True

    def ended_well(self) -> None:
        """Records a session that ended with well accepted blocks of the drafter."""
        self._collapses = 0
        if self._was_bad:
            self._close()

    def refused(self, now: float) -> None:
        """Opens the breaker: the drafter reported that it is overloaded."""
        self._open(now)

    def _close(self) -> None:
        self._open_until = None
        self._probe = None
        self._was_silent = False
        self._was_bad = False
        self._pause_s = max(FIRST_PAUSE_S, self._pause_s / 2)

    def _open(self, now: float) -> None:
        """Opens the breaker for a pause."""
        self._misses = 0
        if self._open_until is None or now >= self._open_until:  # further refusals during a pause do not extend it
            self._open_until = now + self._pause_s
            self._probe = None
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)


class SilentDrafters:
    """Drafters that a target has stopped waiting for, because they answered no request for several steps in a row."""

    def __init__(self) -> None:
        self._missed: Counter[str] = Counter()  # missed steps in a row, by drafter

    def missed(self, drafters: Iterable[str]) -> None:
        """Records that these drafters answered no request for the step just made."""
        self._missed.update(drafters)

    def on_message(self, drafter: str) -> None:
        """Records that the drafter sent a message, or is gone."""
        self._missed.pop(drafter, None)

    def is_silent(self, drafter: str) -> bool:
        """Returns True if the target should not wait for the drafter, probes aside."""
        return self._missed[drafter] >= SILENT_STEPS

    def is_probed(self, drafter: str) -> bool:
        """Returns True if the target waits for a silent drafter in this step."""
        steps, rest = divmod(self._missed[drafter] - SILENT_STEPS + 1, PROBE_STEPS)
        return rest == 0 and (steps + 1).bit_count() == 1 and self.is_silent(drafter)


class CircuitBreakers:
    """A router's breakers, by drafter address."""

    def __init__(self) -> None:
        self.opened: Counter[tuple[str, str]] = Counter()  # number of openings, by address and cause
        self._breakers: defaultdict[str, CircuitBreaker] = defaultdict(CircuitBreaker)

    def takes(self, address: str, now: float) -> bool:
        """Returns True if a session may be given to the drafter."""
        return self._breakers[address].takes(now)

    def placed(self, address: str, session: str, now: float) -> None:
        """Records that a session was given to the drafter."""
        self._breakers[address].placed(session, now)

    def note(self, address: str, session: str, answer: DraftAnswer, has_drafted: bool, now: float) -> bool:
        """Records a drafter's answer for a session; `has_drafted` is False until the drafter's first answer for it.

        Returns True if the drafter is given up as silent now; the router then moves its sessions.
        """
        if answer is DraftAnswer.MISSED:
            opens = self._breakers[address].missed(now, SILENT_S if has_drafted else FIRST_BLOCK_S)
            self.opened[address, "silent"] += opens
            return opens
        if answer is DraftAnswer.GIVEN:
            self._breakers[address].answered(session)
        return False

    def refused(self, address: str, now: float) -> None:
        """Records that the drafter reported overload."""
        self.opened[address, "overloaded"] += self._breakers[address].takes(now)
        self._breakers[address].refused(now)

    def collapsed(self, address: str, now: float) -> bool:
        """Records that blocks became bad in a session even after a resync.

        Returns True if the drafter is given up now.
        """
        opens = self._breakers[address].collapsed(now)
        self.opened[address, "bad"] += opens
        return opens

    def are_open(self, now: float) -> dict[str, bool]:
        """Returns, by address, whether the drafter is given no sessions."""
        return {address: not breaker.takes(now) for address, breaker in dict(self._breakers).items()}

    def ended_well(self, address: str) -> None:
        """Records a session that ended with well accepted blocks of the drafter."""
        self._breakers[address].ended_well()

    def forget(self, address: str) -> None:
        """Drops a drafter whose stream broke; a reconnected drafter starts with a closed breaker."""
        self._breakers.pop(address, None)
