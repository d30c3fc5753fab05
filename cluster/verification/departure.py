"""How a target replica leaves: it takes no more sessions, and what routers have not moved in time it gives back."""

from collections.abc import Callable

from cluster.dispatch import Send
from cluster.verification.admission import Admission
from cluster.verification.sequence import TargetSession
from protos.messages import Leaving, Open, Refusal, RefusalReason

WHY = "this target replica is stopping"


class Departure:
    """Of one replica; `forget` frees a session."""

    def __init__(self, admission: Admission, forget: Callable[[str], None]) -> None:
        self.is_under_way = False
        self._admission = admission
        self._forget = forget

    @property
    def is_complete(self) -> bool:
        """Whether nobody is served any more."""
        return self.is_under_way and not self._admission.has_sessions

    def begin(self) -> list[Send]:
        """From now on what comes is refused, and routers that have sessions here hear that they are to move them.

        Audits are given back at once, for nobody waits for them.
        """
        self.is_under_way = True
        audits = self._give_back([session for session in self._admission if session.open.audit])
        routers = dict.fromkeys(session.router for session in self._admission)
        return [*audits, *((router, Leaving()) for router in routers)]

    def end(self) -> list[Send]:
        """Gives back all that is left."""
        return self._give_back(list(self._admission))

    def refuse(self, router: str, request: Open) -> list[Send]:
        """A session that comes too late: it is no failure, another target takes it."""
        return [(router, _left(request)), (router, Leaving())] if self.is_under_way else []

    def _give_back(self, sessions: list[TargetSession]) -> list[Send]:
        for session in sessions:
            self._forget(session.open.session)
        return [(session.router, _left(session.open)) for session in sessions]


def _left(request: Open) -> Refusal:
    return Refusal(request.session, request.attempt, RefusalReason.OVERLOADED, WHY)
