"""Results of a simulated run: speed, waiting times, and counters by cause."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protos.frozen import value
from tools.simulation.simulated_router import SimulatedAssignment


@value
class Commit:
    at_s: float
    tokens: int


@value
class Arrival:
    at_s: float
    tokens: int  # committed in the end


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Results of one run. Seconds are virtual."""

    sessions: int  # sessions that ended normally
    failed: int  # sessions that ended with an error, for lack of a target
    abandoned: int  # sessions whose router died
    tokens: int  # committed
    tokens_per_s: float  # between the first and the last quarter of the tokens, under full load
    met: float  # share of the tokens requested while sessions arrived that was committed meanwhile
    latency_s: float  # median, of whole sessions
    first_token_s: float  # median
    longest_gap_s: float  # longest time between two commits of one session
    verifies: int  # verdicts committed
    blocks: int  # verdicts over a block
    drafted: int
    accepted: int
    steps: int  # over all targets
    target_busy: float  # mean share of time that targets (below: drafters) computed
    drafter_busy: float
    causes: Counter[str]  # why blocks were dropped, and other counters
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
    """Returns tokens per second between the commits at one and at three quarters of all tokens."""
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
    """Returns the share of the demand of the last three quarters of arrivals that was committed by the last arrival.

    About 1 in a steady state, where as much begins as ends. Less if the queue keeps growing.
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
    """Returns the median of the known values; 0 if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0


def sums(assignments: Sequence[SimulatedAssignment]) -> dict[str, int]:
    """Sums the verification counters."""
    counts = [assignment.session.counts for assignment in assignments]
    return {name: sum(getattr(c, name) for c in counts) for name in ("verifies", "blocks", "drafted", "accepted")}
