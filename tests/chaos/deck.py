"""Chooses the next failure: all kinds in random order, then all again in another. Pure."""

import random
from collections.abc import Callable, Sequence


class Deck:
    """Kinds of blows, of which none comes again before each has come, but those that nobody is there for."""

    def __init__(self, kinds: Sequence[str], rng: random.Random) -> None:
        self._kinds = tuple(kinds)
        self._rng = rng
        self._left: list[str] = []

    def draw(self, may_come: Callable[[str], bool]) -> str | None:
        """The next kind that may come now; None where those that are left have to wait."""
        if not self._left:
            self._left = self._rng.sample(self._kinds, len(self._kinds))
        kind = next(filter(may_come, self._left), None)
        if kind is not None:
            self._left.remove(kind)
        return kind
