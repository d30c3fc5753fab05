"""What a simulated run came to: speed, waiting times, and counters by cause."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos.values import value
from tools.simulation.simulated_router import SimulatedAssignment


@value
class Commit:
    at_s: float
    tokens: int


@value
class Arrival:
    at_s: float
    tokens: int  # that it was committed in the end


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """One run. Seconds are virtual."""

    sessions: int  # that ended in order
    failed: int  # that ended with an error, for want of a target
    abandoned: int  # whose router died
    tokens: int  # committed
    tokens_per_s: float  # between the first and the last quarter of the tokens, when the load was on
    met: float  # of the tokens that were asked for while sessions came, the share that was committed meanwhile
    latency_s: float  # median, of whole sessions
    first_token_s: float  # median
    longest_gap_s: float  # the worst between two commits of one session
    verifies: int  # verdicts committed
    blocks: int  # of them with a block
    drafted: int
    accepted: int
    steps: int  # of all targets
    target_busy: float  # share of the time that targets and drafters computed
    drafter_busy: float
    causes: Counter[str]  # why blocks were dropped, and what else drafters counted
    happened: int  # simulated events

    @property
    def tokens_per_block(self) -> float | None:
        """Mean tokens that a verified block commits."""
        return 1 + self.accepted / self.blocks if self.blocks else None

    @property
    def guess_hit_rate(self) -> float | None:
        guesses = self.causes["guess_hit"] + self.causes["guess_miss"]
        return self.causes["guess_hit"] / guesses if guesses else None


def steady_rate(commits: Sequence[Commit]) -> float:
    """Tokens a second between the commits at one and at three quarters of all tokens."""
    total = sum(commit.tokens for commit in commits)
    passed = 0
    first = last = None
    for commit in commits:
        passed += commit.tokens
        if first is None and passed >= total / 4:
            first = (commit.at_s, passed)
        if last is None and passed >= 3 * total / 4:
            last = (commit.at_s, passed)
    if first is None or last is None or last[0] == first[0]:
        return 0.0
    return (last[1] - first[1]) / (last[0] - first[0])


def share_met(arrivals: Sequence[Arrival], commits: Sequence[Commit]) -> float:
    """Of the tokens asked for by the last three quarters of the arrivals, how much was committed until the last came.

    About 1 in a steady state: as much is begun as is ended. Less where what waits grows and grows.
    """
    times = sorted(arrival.at_s for arrival in arrivals)
    if not times:
        return 1.0
    begins = times[len(times) // 4]
    ends = times[-1]
    asked = sum(arrival.tokens for arrival in arrivals if begins < arrival.at_s <= ends)
    done = sum(commit.tokens for commit in commits if begins < commit.at_s <= ends)
    return done / asked if asked else 1.0


def median(values: Iterable[float | None]) -> float:
    """Of those that there are; 0 when there is none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


def sums(assignments: Sequence[SimulatedAssignment]) -> dict[str, int]:
    """What verification came to."""
    counts = [assignment.session.counts for assignment in assignments]
    return {name: sum(getattr(c, name) for c in counts) for name in ("verifies", "blocks", "drafted", "accepted")}
