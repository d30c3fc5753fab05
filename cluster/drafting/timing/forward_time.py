"""How long a model's forwards take, as a line over the rows they feed, fitted to the forwards themselves.

Pure arithmetic.
"""

from cluster.pacing.smoothing import Pairs

MEMORY = 0.02  # weight of the latest forward


class ForwardTime:
    """A line over rows, fitted to the latest forwards."""

    def __init__(self) -> None:
        self._line = Pairs()

    def learn(self, rows: int, seconds: float) -> None:
        self._line = self._line.after(rows, seconds, MEMORY)

    def most_rows(self, limit: int, seconds: float) -> int:
        """As many, up to `limit`, as a forward within so many seconds feeds; all where nothing is known yet."""
        slope = self._line.slope
        if not slope:  # rows cost nothing, as far as can be told
            return limit if self._line.base <= seconds else 0
        return max(0, int(min(limit, (seconds - self._line.base) / slope)))
