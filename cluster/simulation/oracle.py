"""The two models, replaced by an oracle: what the target would say, and where the draft would say the same.

The target's text is a keyed pseudo-random function of (seed, session, position), and so is whether the draft agrees
there. That makes 'the output equals the plain one' a comparison of integers, whatever the schedule was.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from cluster.simulation.workload import Workload

STOP = 0
VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Script:
    """One session's text, prompt included, as far as its length limit, and how hard each token is to guess."""

    tokens: tuple[int, ...]
    prompt_len: int
    hardness: tuple[float, ...]  # by position: the draft agrees where its acceptance is above this

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.prompt_len]

    @property
    def max_len(self) -> int:
        return len(self.tokens)

    @property
    def plain(self) -> tuple[int, ...]:
        """What plain decoding commits: up to the first stop id, or to the length limit."""
        new = self.tokens[self.prompt_len :]
        return new[: new.index(STOP) + 1] if STOP in new else new

    def in_pages(self, size: int) -> list[list[int]]:
        """All tokens, so many in each page."""
        return [list(self.tokens[at : at + size]) for at in range(0, len(self.tokens), size)]

    def agreed(self, start: int, tokens: Sequence[int]) -> int:
        """How many of `tokens`, the first of them at position `start`, the target would say too."""
        for index, token in enumerate(tokens):
            if token != self.tokens[start + index]:
                return index
        return len(tokens)

    def drafted(self, start: int, count: int, draft: "DraftQuality") -> tuple[int, ...]:
        """The draft model's block from position `start` on."""
        end = start + count
        assert end <= len(self.tokens), "drafted beyond the end"
        said = zip(self.tokens[start:end], self.hardness[start:end], draft.by_position(), strict=False)
        return tuple([token if hardness < acceptance else _other(token) for token, hardness, acceptance in said])

    def choice(self, position: int, acceptance: float) -> int:
        """What the draft model says there."""
        token = self.tokens[position]
        return token if self.hardness[position] < acceptance else _other(token)

    def second_choice(self, position: int, acceptance: float, draft: "DraftQuality") -> int:
        """What it would say otherwise: where it is wrong, it often thinks of the right token too."""
        token = self.tokens[position]
        hardness = self.hardness[position]
        known = acceptance <= hardness < acceptance + (1 - acceptance) * draft.runner_up
        return token if known else _other(_other(token))


def _other(token: int) -> int:
    """Another token that is no stop."""
    return token % (VOCABULARY - 1) + 1


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """How good the draft model is.

    `acceptances` are those of a block's tokens, each given the ones before it; the last one holds for all further
    tokens. Where the draft model is wrong, its second choice is right with chance `runner_up`. If it `branches`, it
    offers that one too for a block's first token.
    """

    acceptances: tuple[float, ...]
    runner_up: float = 0.4
    branches: bool = False

    def acceptance(self, index: int) -> float:
        return self.acceptances[min(index, len(self.acceptances) - 1)]

    def by_position(self) -> Iterator[float]:
        """Acceptances of a block's tokens, however long it is."""
        return chain(self.acceptances, repeat(self.acceptances[-1]))

    def outcomes(self, block_len: int) -> list[int | None]:
        """Places in a block, or just after it, where the second choice may come; None where all is as drafted.

        Likeliest first.
        """
        chances: dict[int | None, float] = {}
        reached = 1.0
        for index in range(block_len + 1):
            acceptance = self.acceptance(index)
            chances[index] = reached * (1 - acceptance) * self.runner_up
            reached *= acceptance
        chances[None] = reached
        return sorted(chances, key=lambda place: -chances[place])


def script(load: Workload, seed: int, index: int) -> Script:
    """The script of one session of the load."""
    rng = random.Random(f"{seed} {index}")
    length = load.prompt_tokens + load.new_tokens
    tokens = rng.choices(range(1, VOCABULARY), k=length)
    if rng.random() < load.stopping:
        tokens[load.prompt_tokens + rng.randrange(load.new_tokens)] = STOP
    hardness = [rng.random() for _ in range(length)]
    return Script(tuple(tokens), load.prompt_tokens, tuple(hardness))
