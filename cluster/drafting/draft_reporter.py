"""What a drafter reports for the size of its pool."""

from cluster.autoscaling.reports import DraftReport, Growth, share
from cluster.costs import DraftCost


class DraftReporter:
    """Of one drafter's passes and blocks."""

    def __init__(self, profile: DraftCost) -> None:
        self._profile = profile
        self._growth = Growth()
        self._shared_s = 0.0

    def pass_made(self, sessions: int, tokens: int, seconds: float) -> None:
        """A pass that was asked for, for so many sessions, the longest block of `tokens`.

        What one session alone takes of it, no further drafter could save; without a profile, each takes as much.
        """
        whole_s = self._profile.seconds(sessions, tokens)
        alone = self._profile.seconds(1, tokens) / whole_s if whole_s else 1 / sessions
        self._shared_s += seconds * max(0.0, 1 - alone)

    def report(self, blocks: int, late: int, now: float) -> DraftReport:
        """Of the time since it was last asked for, with the blocks so far and those of them that came too late."""
        grown = self._growth.of(now=now, shared=self._shared_s, blocks=blocks, late=late)
        return DraftReport(share(grown["shared"], grown["now"]), share(grown["late"], grown["blocks"]))
