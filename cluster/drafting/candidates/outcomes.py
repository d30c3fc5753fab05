"""The verdicts that may come, with their chances, by the draft model's own probabilities.

Pure. An outcome is the verdict's tokens: some of the block's, and then one that differs, or one after all of them.
"""

import math
from collections.abc import Iterator, Sequence

from protos.draft_tree import DraftTree
from protos.values import value


@value
class Choices:
    """Tokens that may come at some position, and how likely the draft model finds each; likeliest first."""

    tokens: Sequence[int]
    chances: Sequence[float]

    def chance_of(self, token: int) -> float:
        """0 for one that was not thought of."""
        return self.chances[self.tokens.index(token)] if token in self.tokens else 0.0

    def including(self, token: int, chance: float) -> "Choices":
        """With a token that was not thought of, and what somebody else gives for it."""
        if token in self.tokens or not chance:
            return self
        return Choices((*self.tokens, token), (*self.chances, chance))

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.tokens, self.chances, strict=True)


NOTHING = Choices((), ())

Outcome = tuple[tuple[int, ...], float]  # and its chance


def accepted_chance(block: Sequence[int], known: Sequence[Choices]) -> float:
    """Of the whole block to be accepted; `known` are the choices at its positions, empty where nothing is known."""
    return math.prod(there.chance_of(token) for token, there in zip(block, known, strict=False))


def rejections(block: DraftTree, known: Sequence[Choices]) -> list[Outcome]:
    """Another token in the place of one of the trunk's, and of those drafted beside it."""
    found = []
    reached = 1.0
    trunk = block.trunk
    parents = (-1, *block.along(trunk))
    for position, (drafted, there) in enumerate(zip(trunk, known, strict=False)):
        accepted = trunk[:position]
        expected = block.children(parents[position])
        found += [((*accepted, token), reached * chance) for token, chance in there if token not in expected]
        reached *= there.chance_of(drafted)
    return found


def continuations(block: Sequence[int], accepted: float, after: Choices) -> list[Outcome]:
    """All of the block, whose chance is `accepted`, and the token after it."""
    return [((*block, token), accepted * chance) for token, chance in after]
