"""Drafter health: passes the outcomes of draft requests to the circuit breakers, and counts and logs recoveries.

A target that detects a collapse of acceptance in one session has the drafter reopen it (`Verdict.collapse`).
"""

import logging
from collections import Counter

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
        self._failed: set[str] = set()  # drafters given up since `take_failed`

    @property
    def has_failed(self) -> bool:
        """True if a drafter has been given up since `take_failed`."""
        return bool(self._failed)

    def on_verdict(self, session: Session, verdict: Verdict, now: float) -> None:
        """Records a verdict of the session's current target."""
        drafter = session.drafter
        if drafter is None or verdict.attempt != session.attempt:
            return
        if verdict.answer is not DraftAnswer.NOT_ASKED:
            is_given = verdict.answer is DraftAnswer.GIVEN
            is_useful = is_given and (verdict.accepted > 0 or not verdict.drafted)
            if self._breakers.note(drafter, verdict.session, is_useful, session.has_drafted, now):
                self._failed.add(drafter)
                self.recoveries[drafter, GIVEN_UP] += 1
                log.warning("drafter %s: no useful blocks; its sessions move to other drafters", drafter)
        if verdict.collapse is not None:
            self.recoveries[drafter, RESYNCED] += 1
            log.warning(
                "session %s: drafter %s: the target rejects every block (usually accepts %.0f %%); the drafter reopens"
                " the session",
                verdict.session,
                drafter,
                100 * verdict.collapse.usual,
            )

    def take_failed(self) -> set[str]:
        """Returns the drafters given up since the previous call."""
        failed = self._failed
        self._failed = set()
        return failed
