"""Start of the next step, and when each session is due: sessions that skip steps, and the hold for blocks.

Pure; pacing decides the durations.
"""

import math
from collections.abc import Mapping

from cluster.speculation.circuit_breaker import SilentDrafters
from cluster.speculation.cost_model import Load
from cluster.speculation.policy import Awaited, Pacing
from cluster.verification.sequence import TargetSession


class StepTiming:
    """Computes due times. Blocks of silent drafters are not waited for, except as a probe."""

    def __init__(self, pacing: Pacing, silent: SilentDrafters) -> None:
        self._pacing = pacing
        self._silent = silent

    def dues(self, sessions: Mapping[str, TargetSession], load: Load) -> tuple[dict[str, float], float]:
        """Returns when each session goes into a step, and when the next step begins if no further block arrives.

        A session is due at once, unless it should skip steps until its block arrives. The step is held for awaited
        blocks. Without sessions it never begins (infinity).
        """
        dues: dict[str, float] = {}
        awaited: list[TargetSession] = []
        for name, session in sessions.items():
            drafter = session.awaited_drafter
            if drafter is None:
                dues[name] = session.waiting_since
            elif session.ready_block() is not None:
                dues[name] = max(session.waiting_since, session.buffer.ready_since)
            else:
                is_silent = self._silent.is_silent(drafter)
                patience_s = self._probe_s(session, drafter, load) if is_silent else session.drafting.skip_for_s
                dues[name] = session.waiting_since + patience_s
                if session.drafting.hold_step and not is_silent:
                    awaited.append(session)
        first = min(dues.values(), default=math.inf)
        if not awaited:
            return dues, first
        blocks = [
            Awaited(session.drafting.worth, session.waiting_since + session.stats.delay_s - first)
            for session in awaited
        ]
        return dues, first + self._pacing.hold_for_s(blocks, load)

    def _probe_s(self, session: TargetSession, drafter: str, load: Load) -> float:
        """Returns how long the session skips steps for the block of a silent drafter."""
        is_probed = session.drafting.hold_step and self._silent.is_probed(drafter)
        return load.step.plain_s(load.sessions) if is_probed else 0.0
