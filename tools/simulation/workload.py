"""Load of the simulated system: number of sessions, their lengths, and their arrival times."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of concurrent sessions: when one ends, the next begins.

    Sessions may come in batches, as in a benchmark: the last ones of a batch run with ever fewer others, and the next
    batch begins when all have ended.
    """

    concurrency: int
    batch: int | None = None  # sessions

    def due(self, begun: int, ended: int, sessions: int) -> int:
        """Returns how many sessions are to begin now, of `sessions` in total."""
        last = sessions if self.batch is None else min(sessions, (ended // self.batch + 1) * self.batch)
        return min(self.concurrency - (begun - ended), last - begun)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Sessions arrive independently of each other and of the system's state.

    The arrivals of a run span exactly their mean duration: a random span would make runs hard to compare.
    """

    per_s: float

    def times(self, sessions: int, rng: random.Random) -> list[float]:
        """Draws the arrival times in seconds from the beginning, in ascending order."""
        return sorted(rng.uniform(0.0, sessions / self.per_s) for _ in range(sessions))


@dataclass(frozen=True, slots=True)
class Workload:
    """All sessions of one run."""

    arrivals: ClosedLoop | Poisson
    sessions: int
    prompt_tokens: int = 32
    new_tokens: int = 64
    stopping: float = 0.0  # share of sessions that end with a stop id before their length limit
