"""The number of sessions that a drafter can serve in time: lowered when most blocks are late, raised when few are.

Uses additive increase and multiplicative decrease over windows of blocks. Pure.
"""

WINDOW_BLOCKS = 8  # per session: enough to distinguish LATE from IN_TIME
LEAST_WINDOW = 64  # blocks, over all sessions
LATE = 0.5  # share of late blocks above which there are too many sessions: most blocks are wasted
IN_TIME = 0.125  # share of late blocks below which more sessions fit
SHED = 0.25  # share of sessions to give up at once
GROW = 0.125  # share of sessions to add: smaller than SHED, or the number would oscillate


class Capacity:
    """The number of sessions that a drafter takes, at most `most`."""

    def __init__(self, most: int) -> None:
        self.sessions = most
        self._most = most
        self._blocks = self._late = 0  # in the current window

    def note(self, late: bool, sessions: int) -> int:
        """Records a drafted block, late or in time; returns how many of the current `sessions` to give up now."""
        self._blocks += 1
        self._late += late
        if self._blocks < max(LEAST_WINDOW, WINDOW_BLOCKS * sessions):
            return 0
        share = self._late / self._blocks
        self._blocks = self._late = 0
        if share > LATE and sessions > 1:
            self.sessions = sessions - max(1, int(SHED * sessions))
            return sessions - self.sessions
        if share < IN_TIME:
            self.sessions = min(self._most, self.sessions + max(1, int(GROW * self.sessions)))
        return 0
