"""How long a model's forwards take, as a line over the rows they feed, fitted to the forwards themselves.

Pure arithmetic.
"""

MEMORY = 0.98  # weight that a forward keeps with each later one
LEAST_SPREAD = 1e-6  # variance of the rows, below which they were all the same


class ForwardTime:
    """A line over rows, fitted to the latest forwards by least squares."""

    def __init__(self) -> None:
        self._weight = self._rows = self._squares = self._seconds = self._products = 0.0

    def learn(self, rows: int, seconds: float) -> None:
        self._weight = MEMORY * self._weight + 1
        self._rows = MEMORY * self._rows + rows
        self._squares = MEMORY * self._squares + rows * rows
        self._seconds = MEMORY * self._seconds + seconds
        self._products = MEMORY * self._products + rows * seconds

    def most_rows(self, limit: int, seconds: float) -> int:
        """As many, up to `limit`, as a forward within so many seconds feeds; all where nothing is known yet."""
        if not self._weight:
            return limit
        mean_rows = self._rows / self._weight
        mean_s = self._seconds / self._weight
        spread = self._squares / self._weight - mean_rows**2
        slope = (self._products / self._weight - mean_rows * mean_s) / spread if spread > LEAST_SPREAD else 0.0
        if slope <= 0:  # rows cost nothing, as far as can be told
            return limit if mean_s <= seconds else 0
        return max(0, int(min(limit, mean_rows + (seconds - mean_s) / slope)))
