"""Router-side circuit breakers: pause drafters that send no useful blocks, and briefly pause full ones.

A block is useful if the target accepted a token of it. Missing, late and rejected blocks count alike. A router waits
longer than a target before it reacts, because each move costs the new drafter a prefill. Callers pass times in.
"""

from collections import defaultdict, deque

from cluster.speculation.controller import Backoff

MIN_FAILURES = 8  # minimum consecutive requests without a useful block before a drafter is given up
FAILURE_S = 2.0  # minimum time without a useful block if the drafter has drafted for the session
FIRST_BLOCK_S = 10.0  # the same limit while the drafter may still be prefilling the session's prompt
FULL_DRAFTER_PAUSE_S = 0.5  # pause after a full drafter refused a session; its other sessions may end at any time
MAX_PROBES = 32  # maximum number of latest probes whose blocks count; covers FIRST_BLOCK_S at one per pause


class CircuitBreaker:
    """A router's circuit breaker for one drafter.

    A closed breaker lets sessions through. It opens when no block has been useful for too long. After a pause it is
    half-open and passes one session as a probe. It closes on a useful block from any session still on the drafter. A
    full drafter is healthy, so its pauses stay short, and each passes one more session.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._is_full = False
        self._backoff = Backoff()
        self._full_until = 0.0  # end of the pause of a full drafter, or of the wait for the outcome of its probe
        self._probes: deque[str] = deque(maxlen=MAX_PROBES)  # sessions assigned since it opened or was full
        self._probe_until = 0.0
        self._failures = 0  # number of consecutive requests without a useful block
        self._failing_since = 0.0  # time of the first of them
        self._failed_at = -FIRST_BLOCK_S  # time of the latest

    def takes(self, now: float) -> bool:
        """Returns True if the drafter may get a session."""
        if not self.has_room(now):
            return False
        return not self._is_open or (now >= self._backoff.until and (not self._probes or now >= self._probe_until))

    def has_room(self, now: float) -> bool:
        """Returns False during the pause of a full drafter."""
        return now >= self._full_until

    def placed(self, session: str, now: float) -> None:
        """Records an assignment; after a pause, the session becomes a probe."""
        if self._is_full:
            self._full_until = now + FULL_DRAFTER_PAUSE_S
        if self._is_full or (self._is_open and now >= self._backoff.until):
            self._probes.append(session)
            self._probe_until = now + FIRST_BLOCK_S

    def useful(self, session: str) -> None:
        """Records a useful block or a NoDraft."""
        self._failures = 0
        if self._is_open:
            self._is_open = False
            self._backoff.reset()
        if session in self._probes:
            self._probes.clear()
            self._is_full = False

    def failed(self, now: float, limit_s: float) -> bool:
        """Records a request without a useful block.

        Returns True if the breaker opens now because no block has been useful for `limit_s` seconds. A pause of the
        requests ends the count.
        """
        if not self._failures or now - self._failed_at > FIRST_BLOCK_S:
            self._failures = 0
            self._failing_since = now
        self._failed_at = now
        self._failures += 1
        if self._failures < MIN_FAILURES or now - self._failing_since < limit_s:
            return False
        self._failures = 0
        if self._is_open and now < self._backoff.until:
            return False  # failures during a pause do not extend it
        self._is_open = True
        self._probes.clear()
        self._backoff.failed(now)
        return True

    def refused(self, now: float) -> None:
        """Starts a short pause after a full drafter has refused a session."""
        self._is_full = True
        self._probes.clear()
        self._full_until = now + FULL_DRAFTER_PAUSE_S


class CircuitBreakers:
    """A router's circuit breakers, by drafter address."""

    def __init__(self) -> None:
        self._breakers: defaultdict[str, CircuitBreaker] = defaultdict(CircuitBreaker)

    def takes(self, address: str, now: float) -> bool:
        """Returns True if the drafter may get a session."""
        return self._breakers[address].takes(now)

    def has_room(self, address: str, now: float) -> bool:
        """Returns False during the pause of a full drafter."""
        return self._breakers[address].has_room(now)

    def placed(self, address: str, session: str, now: float) -> None:
        """Records the assignment of a session to the drafter."""
        self._breakers[address].placed(session, now)

    def note(self, address: str, session: str, is_useful: bool, has_drafted: bool, now: float) -> bool:
        """Records the outcome of a draft request; `has_drafted` is False before the drafter's first answer in this
        session.

        Returns True if the drafter is given up now; the router must then move its sessions.
        """
        if is_useful:
            self._breakers[address].useful(session)
            return False
        return self._breakers[address].failed(now, FAILURE_S if has_drafted else FIRST_BLOCK_S)

    def refused(self, address: str, now: float) -> None:
        """Records a drafter's report of overload."""
        self._breakers[address].refused(now)

    def are_unavailable(self, now: float) -> dict[str, bool]:
        """Returns, by address, True if the drafter gets no sessions now."""
        return {address: not breaker.takes(now) for address, breaker in dict(self._breakers).items()}

    def forget(self, address: str) -> None:
        """Drops the breaker of a lost drafter; a reconnected drafter starts with a closed breaker."""
        self._breakers.pop(address, None)
