"""How many sessions a drafter can serve in time: fewer when most of its blocks are late, more when few are.

Additive increase, multiplicative decrease over windows of blocks. Pure.
"""

WINDOW_BLOCKS = 8  # of each session: enough to tell LATE from IN_TIME
LEAST_WINDOW = 64  # blocks of all sessions together
LATE = 0.5  # share of late blocks above which there are too many sessions: most blocks are drafted in vain
IN_TIME = 0.125  # share of late blocks below which there is room for more
SHED = 0.25  # share of sessions to give up at once
GROW = 0.125  # share of sessions to take in addition: less than is shed, or the number would swing


class Capacity:
    """The number of sessions that a drafter takes, at most `most`."""

    def __init__(self, most: int) -> None:
        self.sessions = most
        self._most = most
        self._blocks = self._late = 0  # of the window

    def note(self, late: bool, sessions: int) -> int:
        """A block was drafted and came too late or not; returns how many of `sessions` to give up now."""
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
