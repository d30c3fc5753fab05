"""What is asked of the simulated system: how many sessions, how long they are, and when they arrive."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many sessions at once: one ends, the next begins.

    Sessions may come in batches, as those of a benchmark do: the last ones of a batch run with fewer and fewer beside
    them, and only when all have ended does the next batch begin.
    """

    concurrency: int
    batch: int | None = None  # sessions

    def due(self, begun: int, ended: int, sessions: int) -> int:
        """How many are to begin now, of so many in all."""
        last = sessions if self.batch is None else min(sessions, (ended // self.batch + 1) * self.batch)
        return min(self.concurrency - (begun - ended), last - begun)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Sessions arrive independently of each other and of what is going on.

    Those of a run take as long to arrive as so many take on average: luck with their number would have one run compare
    ill with another.
    """

    per_s: float

    def times(self, sessions: int, rng: random.Random) -> list[float]:
        """When each of them arrives, in seconds from the beginning; rising."""
        return sorted(rng.uniform(0.0, sessions / self.per_s) for _ in range(sessions))


@dataclass(frozen=True, slots=True)
class Workload:
    """All sessions of one run."""

    arrivals: ClosedLoop | Poisson
    sessions: int
    prompt_tokens: int = 32
    new_tokens: int = 64
    stopping: float = 0.0  # share of sessions that end with a stop id before their length limit
