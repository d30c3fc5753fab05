"""Drafter health: passes the outcomes of draft requests to the circuit breakers, and counts and logs recoveries.

A target that detects a collapse of acceptance in one session has the drafter reopen it (`Verdict.collapse`). If that
does not help, the drafter has no useful blocks, and its breaker opens.
"""

import logging
from collections import Counter
from collections.abc import Iterator

from cluster.routing.ledger import Session
from cluster.speculation.circuit_breaker import CircuitBreakers
from protos.messages import DraftAnswer, Verdict

log = logging.getLogger(__name__)

RESYNCED = "resynced"  # recoveries: a drafter reopened a session
GIVEN_UP = "given up"  # a drafter gets no sessions for a while


class DrafterWatch:
    """Watches all drafters of a router. `on_verdict` is cheap, because it runs in every round."""

    def __init__(self, breakers: CircuitBreakers) -> None:
        self.recoveries: Counter[tuple[str, str]] = Counter()  # by (drafter, RESYNCED or GIVEN_UP)
        self._breakers = breakers
        self._answered: dict[str, Session] = {}  # sessions with answers since the latest tick

    @property
    def has_updates(self) -> bool:
        """True if there are unprocessed answers."""
        return bool(self._answered)

    def on_verdict(self, session: Session, verdict: Verdict) -> None:
        """Records a verdict."""
        if verdict.answer is not DraftAnswer.NOT_ASKED:
            self._answered[verdict.session] = session
        if verdict.collapse is not None and verdict.attempt == session.attempt and session.drafter is not None:
            self.recoveries[session.drafter, RESYNCED] += 1
            log.warning(
                "session %s: drafter %s: target accepts no tokens, usually of %.0f %% of the blocks;"
                " the drafter reopens the session",
                verdict.session,
                session.drafter,
                100 * verdict.collapse.usual,
            )

    def forget(self, session: str) -> None:
        self._answered.pop(session, None)

    def pop_failed(self, now: float) -> Iterator[str]:
        """Yields drafters that are now given up. Move each drafter's sessions before requesting the next."""
        answered = list(self._answered.items())
        self._answered = {}
        for name, session in answered:
            drafter = session.drafter
            for is_useful in session.take_answers():
                if drafter is not None and self._breakers.note(drafter, name, is_useful, session.has_drafted, now):
                    self.recoveries[drafter, GIVEN_UP] += 1
                    log.warning("drafter %s: no useful blocks; its sessions move to other drafters", drafter)
                    yield drafter
