"""Drafter health: handles targets' reports of missed blocks and collapsed acceptance, with counts and logs.

The target detects a collapse of acceptance per session, and has the drafter reopen the session (`Verdict.collapse`). If
that fails, the session moves once to another drafter. After that, or without another drafter, the session continues
without speculation.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from cluster.routing.ledger import Session
from cluster.speculation.circuit_breaker import CircuitBreakers
from protos.messages import Collapse, DraftAnswer, Verdict

log = logging.getLogger(__name__)


class RecoveryStep(Enum):
    """Recovery steps, in order of escalation. GIVEN_UP applies to a drafter, the others to a session."""

    RESYNCED = "resynced"
    REPLACED = "replaced"
    NON_SPECULATIVE = "non_speculative"
    GIVEN_UP = "given up"


STEP_MEANING = {
    RecoveryStep.RESYNCED: "the drafter reopens the session",
    RecoveryStep.REPLACED: "the session moves to another drafter",
    RecoveryStep.NON_SPECULATIVE: "the session continues without speculation",
}


@dataclass(frozen=True, slots=True)
class Complaint:
    """A target's report of collapsed acceptance in a session."""

    session: str
    drafter: str
    collapse: Collapse


def next_recovery_step(collapse: Collapse, was_replaced: bool, has_alternative: bool) -> RecoveryStep:
    """Returns the next recovery step of a session; `has_alternative` is True if another drafter accepts sessions."""
    if not collapse.is_resynced:
        return RecoveryStep.RESYNCED
    return RecoveryStep.REPLACED if has_alternative and not was_replaced else RecoveryStep.NON_SPECULATIVE


class RecoveryLog:
    """Counts and logs recovery steps by drafter."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, RecoveryStep]] = Counter()

    def record(self, complaint: Complaint, recovery: RecoveryStep) -> None:
        """Records a recovery step of one session."""
        self.counts[complaint.drafter, recovery] += 1
        collapse = complaint.collapse
        log.warning(
            "session %s: drafter %s: target accepts tokens of %.0f %% of its blocks, usually %.0f %%; %s",
            complaint.session,
            complaint.drafter,
            100 * collapse.latest,
            100 * collapse.usual,
            STEP_MEANING[recovery],
        )

    def by_step(self) -> dict[tuple[str, str], int]:
        """Returns the counts by (drafter, step name)."""
        return {(drafter, step.value): count for (drafter, step), count in self.counts.items()}

    def given_up(self, drafter: str) -> None:
        """Records that a drafter is given up after collapses in several sessions."""
        self.counts[drafter, RecoveryStep.GIVEN_UP] += 1
        log.warning("drafter %s: acceptance collapsed in several sessions; pausing its new sessions", drafter)


GOOD_SESSION_TOKENS = 8  # minimum accepted draft tokens of a good session


class DrafterWatch:
    """Watches all drafters of a router. `on_verdict` is cheap, because it runs in every round."""

    def __init__(self, breakers: CircuitBreakers) -> None:
        self.given_up: Counter[str] = Counter()  # number of times that each drafter was given up as silent
        self._breakers = breakers
        self._answered: dict[str, Session] = {}  # sessions with answers since the latest tick
        self._complaints: list[Complaint] = []  # complaints since the latest tick
        self._reported_drafters: dict[str, str] = {}  # latest drafter with a complaint, by session

    @property
    def has_updates(self) -> bool:
        """True if there are unprocessed answers or complaints."""
        return bool(self._answered or self._complaints)

    def on_verdict(self, session: Session, verdict: Verdict) -> None:
        """Records a verdict."""
        if verdict.answer is not DraftAnswer.NOT_ASKED:
            self._answered[verdict.session] = session
        if verdict.collapse is not None and verdict.attempt == session.attempt and session.drafter is not None:
            self._reported_drafters[verdict.session] = session.drafter
            self._complaints.append(Complaint(verdict.session, session.drafter, verdict.collapse))

    def ended(self, session: Session, drafter: str) -> None:
        """Records the normal end of a session; `drafter` is its last drafter."""
        reported = self._reported_drafters.get(session.generation.session)
        if drafter != reported and session.counts.accepted >= GOOD_SESSION_TOKENS:
            self._breakers.ended_well(drafter)

    def forget(self, session: str) -> None:
        self._answered.pop(session, None)
        self._reported_drafters.pop(session, None)

    def take_complaints(self) -> list[Complaint]:
        """Returns and clears the complaints."""
        complaints = self._complaints
        self._complaints = []
        return complaints

    def pop_silent(self, now: float) -> Iterator[str]:
        """Yields drafters that are now given up as silent. Move each drafter's sessions before requesting the next."""
        answered = list(self._answered.items())
        self._answered = {}
        for name, session in answered:
            drafter = session.drafter
            for answer in session.take_answers():
                if drafter is not None and self._breakers.note(drafter, name, answer, session.has_drafted, now):
                    self.given_up[drafter] += 1
                    yield drafter
