"""Chooses the next failure from shuffled rounds of all kinds. Pure."""

import random
from collections.abc import Callable, Sequence


class Deck:
    """Deals each kind of failure once per round; postpones kinds without a possible victim."""

    def __init__(self, kinds: Sequence[str], rng: random.Random) -> None:
        self._kinds = tuple(kinds)
        self._rng = rng
        self._left: list[str] = []

    def draw(self, may_come: Callable[[str], bool]) -> str | None:
        """Returns the next possible kind; None if all remaining ones must wait."""
        if not self._left:
            self._left = self._rng.sample(self._kinds, len(self._kinds))
        kind = next(filter(may_come, self._left), None)
        if kind is not None:
            self._left.remove(kind)
        return kind
