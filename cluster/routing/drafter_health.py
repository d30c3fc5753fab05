"""Drafters that miss blocks or whose blocks became bad: targets' reports, recovery steps, counts and logs.

The target detects bad blocks per session and has the drafter open the session again (`Verdict.collapse`). If that does
not help, the session moves to another drafter, once. After that, or without another drafter, the session continues
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
    """Recovery steps, in order. The last one concerns a drafter, the others one of its sessions."""

    RESYNCED = "resynced"
    REPLACED = "replaced"
    NON_SPECULATIVE = "non_speculative"
    GIVEN_UP = "given up"


STEP_MEANING = {
    RecoveryStep.RESYNCED: "it opens the session again",
    RecoveryStep.REPLACED: "another drafter takes the session",
    RecoveryStep.NON_SPECULATIVE: "the session continues without speculation",
}


@dataclass(frozen=True, slots=True)
class Complaint:
    """A target's report that a drafter's blocks for a session became bad."""

    session: str
    drafter: str
    collapse: Collapse


def next_remedy(collapse: Collapse, was_replaced: bool, has_other: bool) -> RecoveryStep:
    """Returns the next step for a session; `has_other`: whether another drafter accepts sessions."""
    if not collapse.is_resynced:
        return RecoveryStep.RESYNCED
    return RecoveryStep.REPLACED if has_other and not was_replaced else RecoveryStep.NON_SPECULATIVE


class RecoveryLog:
    """Counts and logs recovery steps by drafter address."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, RecoveryStep]] = Counter()

    def record(self, complaint: Complaint, remedy: RecoveryStep) -> None:
        """Records a step for one session."""
        self.counts[complaint.drafter, remedy] += 1
        collapse = complaint.collapse
        log.warning(
            "session %s: drafter %s: target accepts tokens of %.0f %% of its blocks, usually %.0f %%; %s",
            complaint.session,
            complaint.drafter,
            100 * collapse.latest,
            100 * collapse.usual,
            STEP_MEANING[remedy],
        )

    def by_step(self) -> dict[tuple[str, str], int]:
        """Returns the counts by drafter and step name."""
        return {(drafter, step.value): count for (drafter, step), count in self.counts.items()}

    def given_up(self, drafter: str) -> None:
        """Records that a drafter is given up because its blocks became bad in several sessions."""
        self.counts[drafter, RecoveryStep.GIVEN_UP] += 1
        log.warning("drafter %s: blocks became bad in several sessions; it gets no new sessions for a while", drafter)


GOOD_SESSION_TOKENS = 8  # accepted draft tokens from which a session counts as drafted well


class DrafterWatch:
    """Watches all drafters of a router. Recording a verdict is cheap, because it is on the path of every round."""

    def __init__(self, breakers: CircuitBreakers) -> None:
        self.given_up: Counter[str] = Counter()  # times that a drafter was given up as silent
        self._breakers = breakers
        self._answered: dict[str, Session] = {}  # sessions whose drafters were asked for blocks since the last tick
        self._complaints: list[Complaint] = []  # complaints from targets since the last tick
        self._complained_of: dict[str, str] = {}  # by session: the latest drafter whose blocks became bad

    @property
    def has_news(self) -> bool:
        """True if there are answers or complaints to process."""
        return bool(self._answered or self._complaints)

    def on_verdict(self, session: Session, verdict: Verdict) -> None:
        """Records a target's verdict for a session."""
        if verdict.answer is not DraftAnswer.NOT_ASKED:
            self._answered[verdict.session] = session
        if verdict.collapse is not None and verdict.attempt == session.attempt and session.drafter is not None:
            self._complained_of[verdict.session] = session.drafter
            self._complaints.append(Complaint(verdict.session, session.drafter, verdict.collapse))

    def ended(self, session: Session, drafter: str) -> None:
        """Records that a session ended normally with `drafter` as its last drafter."""
        complained_of = self._complained_of.get(session.generation.session)
        if drafter != complained_of and session.counts.accepted >= GOOD_SESSION_TOKENS:
            self._breakers.ended_well(drafter)

    def forget(self, session: str) -> None:
        self._answered.pop(session, None)
        self._complained_of.pop(session, None)

    def take_complaints(self) -> list[Complaint]:
        """Returns the complaints since the previous call."""
        complaints = self._complaints
        self._complaints = []
        return complaints

    def silent(self, now: float) -> Iterator[str]:
        """Yields the drafters that are given up now; move each one's sessions before taking the next."""
        answered = list(self._answered.items())
        self._answered = {}
        for name, session in answered:
            drafter = session.drafter
            for answer in session.take_answers():
                if drafter is not None and self._breakers.note(drafter, name, answer, session.has_drafted, now):
                    self.given_up[drafter] += 1
                    yield drafter
