"""Acceptance by position in a block, counted over all blocks of a replica, for plans.

Pacing goes by `yields`, which forget within some tens of blocks.
"""

from itertools import zip_longest
from typing import Self

from cluster.pacing.acceptance import POSITIONS
from protos.values import value

ENOUGH = 32  # times that a position was reached, before which nothing is said of it


@value
class AcceptanceCounts:
    """They go as far as was ever asked for; positions from POSITIONS on are not counted."""

    reached: tuple[int, ...] = ()  # blocks asked to go as far, of which all before that position was accepted
    accepted: tuple[int, ...] = ()  # and that position too

    def after(self, asked: int, accepted: int) -> "AcceptanceCounts":
        """A block was verified. One that ended early, in doubt, counts as rejected where it ended."""
        asked = min(asked, POSITIONS)
        reached = tuple(index <= accepted for index in range(asked))
        stood = tuple(index < accepted for index in range(asked))
        return AcceptanceCounts(_sums(self.reached, reached), _sums(self.accepted, stood))

    def __add__(self, other: Self) -> "AcceptanceCounts":
        """Of two replicas."""
        return AcceptanceCounts(_sums(self.reached, other.reached), _sums(self.accepted, other.accepted))

    def by_position(self) -> tuple[float, ...]:
        """Chance of each position, given those before it, as far as enough was seen."""
        found: list[float] = []
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            if reached < ENOUGH:
                break
            found.append(accepted / reached)
        return tuple(found)


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([a + b for a, b in zip_longest(one, other, fillvalue=0)])
