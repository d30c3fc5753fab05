"""What verdicts say of drafters, until somebody looks: whose blocks were missed for too long, whose became bad."""

from collections import Counter
from collections.abc import Iterator

from cluster.pacing.health import Breakers
from cluster.routing.remedies import Complaint
from cluster.routing.session import Session
from protos.messages import DraftAnswer, Verdict

WELL = 8  # draft tokens accepted in a session, after which it says that its drafter drafts well


class DrafterWatch:
    """Of all drafters of a router; taking a verdict has no part in a round, so it costs next to nothing."""

    def __init__(self, breakers: Breakers) -> None:
        self.given_up: Counter[str] = Counter()  # times that a drafter was silent for too long
        self._breakers = breakers
        self._answered: dict[str, Session] = {}  # whose drafters were asked for blocks since the last look
        self._complaints: list[Complaint] = []  # of targets, since the last look
        self._complained_of: dict[str, str] = {}  # by session: the latest drafter whose blocks became bad

    @property
    def has_news(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._answered or self._complaints)

    def heard(self, session: Session, verdict: Verdict) -> None:
        """A target has decided something of a session."""
        if verdict.answer is not DraftAnswer.NOT_ASKED:
            self._answered[verdict.session] = session
        if verdict.collapse is not None and verdict.attempt == session.attempt and session.drafter is not None:
            self._complained_of[verdict.session] = session.drafter
            self._complaints.append(Complaint(verdict.session, session.drafter, verdict.collapse))

    def ended(self, session: Session, drafter: str) -> None:
        """Its text is whole, and this drafter was its last."""
        complained_of = self._complained_of.get(session.generation.session)
        if drafter != complained_of and session.counts.accepted >= WELL:
            self._breakers.ended_well(drafter)

    def forget(self, session: str) -> None:
        self._answered.pop(session, None)
        self._complained_of.pop(session, None)

    def take_complaints(self) -> list[Complaint]:
        """Those since this was last called."""
        complaints = self._complaints
        self._complaints = []
        return complaints

    def silent(self, now: float) -> Iterator[str]:
        """Drafters that are given up now; the next one is looked for once the sessions of the one before are moved."""
        answered = list(self._answered.items())
        self._answered = {}
        for name, session in answered:
            drafter = session.drafter
            for answer in session.take_answers():
                if drafter is not None and self._breakers.note(drafter, name, answer, session.has_drafted, now):
                    self.given_up[drafter] += 1
                    yield drafter
