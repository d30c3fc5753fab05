"""Exponentially weighted estimators: a mean, and a ratio with its error or a line over pairs of measurements.

They are immutable; each measurement makes a new value. `memory` is the weight of the latest measurement, so about 1 /
memory of them count. Pure arithmetic.
"""

import math

from protos.frozen import value

LEAST_SPREAD = 1e-6  # spread of x relative to its squares; below it, all x were the same up to rounding


def blend(old: float, new: float, memory: float) -> float:
    return (1 - memory) * old + memory * new


@value
class Mean:
    """A mean over equally weighted measurements until their weight falls to `memory`, and exponentially weighted after
    that."""

    count: int = 0
    value: float = 0.0

    def after(self, measured: float, memory: float) -> "Mean":
        return Mean(self.count + 1, blend(self.value, measured, max(memory, 1 / (self.count + 1))))


@value
class Pairs:
    """Pairs of measurements x and y made together: decayed sums, their ratio, and the line through them."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    x_squares: float = 0.0
    y_squares: float = 0.0
    products: float = 0.0

    def after(self, x: float, y: float, memory: float) -> "Pairs":
        kept = 1 - memory
        return Pairs(
            kept * self.weight + 1,
            kept * self.x + x,
            kept * self.y + y,
            kept * self.x_squares + x * x,
            kept * self.y_squares + y * y,
            kept * self.products + x * y,
        )

    @property
    def ratio(self) -> float:
        """Ratio of the sums, y over x; 1 before any measurement."""
        return self.y / self.x if self.x else 1.0

    @property
    def ratio_error(self) -> float:
        """Standard error of the ratio, if the pairs are independent."""
        ratio = self.ratio
        squares = self.y_squares - 2 * ratio * self.products + ratio * ratio * self.x_squares
        return math.sqrt(max(0.0, squares)) / self.x if self.x else 0.0

    @property
    def slope(self) -> float:
        """Slope of the least-squares line, clamped so that neither it nor the value at x = 0 is negative.

        Durations neither fall nor begin below 0. The slope is 0 while all x are the same.
        """
        spread = self.weight * self.x_squares - self.x**2
        if spread <= LEAST_SPREAD * self.x_squares:
            return 0.0
        slope = (self.weight * self.products - self.x * self.y) / spread
        return min(max(0.0, slope), self.y / self.x)

    @property
    def base(self) -> float:
        """Value of the line at x = 0."""
        return max(0.0, self.y - self.slope * self.x) / self.weight if self.weight else 0.0
