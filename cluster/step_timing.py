"""When the next step begins, and who is due for it: patience with blocks, and the hold for others' blocks.

Pure; the durations are pacing's. Knows nothing of pages or of what a step computes.
"""

import math
from collections.abc import Mapping

from cluster.breaker import SilentDrafters
from cluster.pacing import Load, Pacing
from cluster.target_session import TargetSession


class StepTiming:
    """Asks the pacing for each session's patience, but for those of silent drafters."""

    def __init__(self, pacing: Pacing, silent: SilentDrafters) -> None:
        self._pacing, self._silent = pacing, silent

    def due(self, session: TargetSession, load: Load) -> float:
        """When the session goes into a step: at once, unless waiting for its block may pay."""
        if not session.expects_block:
            return session.waiting_since
        if session.ready_block() is not None:
            return max(session.waiting_since, session.room.ready_since)
        assert session.drafter is not None, "a block is expected of nobody"
        if self._silent.is_silent(session.drafter):
            is_probed = self._silent.is_probed(session.drafter)
            return session.waiting_since + (load.step.latest_s if is_probed else 0.0)
        return session.waiting_since + self._pacing.patience_s(session.blocks, session.asked, load)

    def start(
        self, sessions: Mapping[str, TargetSession], dues: Mapping[str, float], load: Load, now: float = -math.inf
    ) -> float:
        """When the next step begins, if no further block comes; infinity when there is no session.

        `dues` is when each session is due. Those that are ready wait a little for others whose blocks are expected;
        `now` is when this is asked.
        """
        first = min(dues.values(), default=math.inf)
        hold_until = first + self._pacing.hold_s(load)
        later = [(name, at) for name, at in dues.items() if at > now and at > first]
        late = [at for name, at in later if _is_awaited(sessions[name], hold_until)]
        return min(hold_until, max(late)) if late else first


def _is_awaited(session: TargetSession, until: float) -> bool:
    """Whether the others wait for a session's block: not if it is late as a rule, nor for one on trial."""
    return session.waiting_since + session.blocks.delay_s <= until and not session.blocks.is_on_trial
