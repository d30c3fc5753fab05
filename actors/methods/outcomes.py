"""What a verdict may bring, by what the draft model thought of at each position of the block under verification.

Pure. An outcome is the verdict's tokens: some of the block's, and then one that differs, or one after all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that may come at some position, and how likely the draft model finds it."""

    token: int
    chance: float


Choices = tuple[Choice, ...]  # at one position, likeliest first
Outcome = tuple[tuple[int, ...], float]  # and its chance


def accepted_chance(block: Sequence[int], known: Sequence[Choices]) -> float:
    """Of the whole block to be accepted; `known` are the choices at its positions, empty where nothing is known."""
    return math.prod(_chance_of(token, there) for token, there in zip(block, known, strict=False))


def rejections(block: Sequence[int], known: Sequence[Choices]) -> list[Outcome]:
    """Another token in the place of one of the block's."""
    found = []
    reached = 1.0
    for position, (drafted, there) in enumerate(zip(block, known, strict=False)):
        accepted = tuple(block[:position])
        found += [((*accepted, choice.token), reached * choice.chance) for choice in there if choice.token != drafted]
        reached *= _chance_of(drafted, there)
    return found


def continuations(block: Sequence[int], accepted: float, after: Choices) -> list[Outcome]:
    """All of the block, whose chance is `accepted`, and the token after it."""
    return [((*block, choice.token), accepted * choice.chance) for choice in after]


def _chance_of(token: int, choices: Choices) -> float:
    return next((choice.chance for choice in choices if choice.token == token), 0.0)
