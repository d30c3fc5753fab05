"""Possible verdicts with their probabilities, by the draft model's own estimates.

An outcome is the tokens of a verdict: some tokens of the block followed by one that differs from the block's next, or
all of the block and one token after it. Pure.
"""

import math
from collections.abc import Iterator, Sequence

from protos.draft_tree import DraftTree
from protos.frozen import value


@value
class Choices:
    """Tokens that may come at a position and the draft model's probability of each; likeliest first."""

    tokens: Sequence[int]
    chances: Sequence[float]

    def chance_of(self, token: int) -> float:
        """Returns the token's probability; 0 if it is not among the choices."""
        return self.chances[self.tokens.index(token)] if token in self.tokens else 0.0

    def including(self, token: int, chance: float) -> "Choices":
        """Returns the choices with `token` added at the probability that another source gives it."""
        if token in self.tokens or not chance:
            return self
        return Choices((*self.tokens, token), (*self.chances, chance))

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.tokens, self.chances, strict=True)


NOTHING = Choices((), ())

Outcome = tuple[tuple[int, ...], float]  # verdict tokens and their probability


def accepted_chance(block: Sequence[int], known: Sequence[Choices]) -> float:
    """Returns the probability that the whole block is accepted.

    `known` lists the choices at the block's positions. Positions after the end of `known` are ignored; an empty entry
    makes the result 0.
    """
    return math.prod(there.chance_of(token) for token, there in zip(block, known, strict=False))


def rejections(block: DraftTree, known: Sequence[Choices]) -> list[Outcome]:
    """Returns the outcomes that reject a token of the main path, by the choices `known` at its positions.

    At each position these are the tokens that no branch of the block contains.
    """
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
    """Returns the outcomes that accept the whole block, with probability `accepted`, and bring one of `after` next."""
    return [((*block, token), accepted * chance) for token, chance in after]
