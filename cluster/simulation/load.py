"""What is asked of the simulated system: how many sessions, how long they are, when they arrive.

Knows nothing of who serves them.
"""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many sessions at once: one ends, the next begins."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class Poisson:
    """Sessions arrive independently of each other and of what is going on."""

    per_s: float

    def gap(self, rng: random.Random) -> float:
        """Seconds from one arrival to the next."""
        return rng.expovariate(self.per_s)


@dataclass(frozen=True, slots=True)
class Load:
    """All sessions of one run."""

    arrivals: ClosedLoop | Poisson
    sessions: int
    prompt_tokens: int = 32
    new_tokens: int = 64
    stopping: float = 0.0  # share of sessions that end with a stop id before their length limit
