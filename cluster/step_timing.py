"""When the next step begins, and who is due for it: sessions that stay out of steps, and the hold for blocks.

Pure; the durations are pacing's. Knows nothing of pages or of what a step computes.
"""

import math
from collections.abc import Mapping

from cluster.breaker import SilentDrafters
from cluster.load import Load
from cluster.pacing import Awaited, Pacing
from cluster.target_session import TargetSession


class StepTiming:
    """Nobody waits for blocks of silent drafters."""

    def __init__(self, pacing: Pacing, silent: SilentDrafters) -> None:
        self._pacing, self._silent = pacing, silent

    def due(self, session: TargetSession, load: Load) -> float:
        """When the session goes into a step: at once, unless it had better stay out until its block is there."""
        if not session.expects_block:
            return session.waiting_since
        if session.ready_block() is not None:
            return max(session.waiting_since, session.room.ready_since)
        assert session.drafter is not None, "a block is expected of nobody"
        if self._silent.is_silent(session.drafter):
            is_probed = session.ask.waits and self._silent.is_probed(session.drafter)
            return session.waiting_since + (load.step.plain_s(load.sessions) if is_probed else 0.0)
        return session.waiting_since + self._pacing.patience_s(session.ask, load)

    def start(self, sessions: Mapping[str, TargetSession], dues: Mapping[str, float], load: Load) -> float:
        """When the next step begins, if no further block comes; infinity when there is no session.

        `dues` is when each session is due.
        """
        first = min(dues.values(), default=math.inf)
        awaited = [
            Awaited(session.ask.worth, session.waiting_since + session.blocks.arrivals.delay_s - first)
            for session in sessions.values()
            if session.ask.waits and self._is_awaited(session)
        ]
        return first + self._pacing.hold_s(awaited, load) if awaited else first

    def _is_awaited(self, session: TargetSession) -> bool:
        if not session.expects_block or session.ready_block() is not None:
            return False
        return session.drafter is not None and not self._silent.is_silent(session.drafter)
