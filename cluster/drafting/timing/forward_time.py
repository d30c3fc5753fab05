"""Duration of a model's forward passes, as a line over the rows that they feed, fitted to measured passes.

Pure arithmetic.
"""

from cluster.speculation.ewma import Pairs

MEMORY = 0.02  # weight of the latest forward pass


class ForwardTime:
    """A line over rows, fitted to recent forward passes."""

    def __init__(self) -> None:
        self._line = Pairs()

    def learn(self, rows: int, seconds: float) -> None:
        self._line = self._line.after(rows, seconds, MEMORY)

    def most_rows(self, limit: int, seconds: float) -> int:
        """Returns the most rows, up to `limit`, that a forward pass feeds in `seconds`; `limit` if nothing is known."""
        slope = self._line.slope
        if not slope:  # no measurable cost per row
            return limit if self._line.base <= seconds else 0
        return max(0, int(min(limit, (seconds - self._line.base) / slope)))
