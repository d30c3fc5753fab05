"""Reports of a drafter that decide the size of the draft pool."""

from cluster.autoscaling.reports import DraftReport, Growth, share
from cluster.costs import DraftCost


class DraftReporter:
    """Accumulates a drafter's pass times and block counts between reports."""

    def __init__(self, profile: DraftCost) -> None:
        self._profile = profile
        self._growth = Growth()
        self._shared_s = 0.0

    def pass_made(self, sessions: int, tokens: int, seconds: float) -> None:
        """Records a requested pass for `sessions` sessions whose longest block had `tokens` tokens.

        Another drafter could save only the time beyond what a single session would take alone, so only that time
        counts. Without a profile, all sessions are assumed to take the same time.
        """
        whole_s = self._profile.seconds(sessions, tokens)
        alone = self._profile.seconds(1, tokens) / whole_s if whole_s else 1 / sessions
        self._shared_s += seconds * max(0.0, 1 - alone)

    def report(self, blocks: int, late: int, now: float) -> DraftReport:
        """Returns the report on the time since the previous one.

        `blocks` and `late` are totals so far; `now` is in seconds.
        """
        grown = self._growth.of(now=now, shared=self._shared_s, blocks=blocks, late=late)
        return DraftReport(share(grown["shared"], grown["now"]), share(grown["late"], grown["blocks"]))
