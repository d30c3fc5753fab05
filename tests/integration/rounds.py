"""Records a target engine's plans and outcomes by session, and lets tests hold steps."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from actors.engine.executor import Engine
from actors.target import TargetReplica
from cluster.verification.step import Outcome, StepPlan
from tests.integration.harness import Cluster, StateReading, WrappedEngine, cluster, eventually


@dataclass(frozen=True)
class Round:
    """Session's row in one step, in token counts."""

    start: int  # cached before the step
    known: int  # computed in the step, excluding draft tokens
    drafted: int
    accepted: int
    decides: bool

    @property
    def end(self) -> int:
        """Returns the number of valid cached tokens after the step."""
        return self.start + self.known + self.accepted


class RecordedEngine(WrappedEngine):
    """Engine that runs and records each step once `may_step` returns True."""

    def __init__(self) -> None:
        self.rounds: defaultdict[str, list[Round]] = defaultdict(list)  # by session
        self.may_step: Callable[[], bool] = lambda: True
        self.is_held = False  # whether a planned step waits

    def wrap(self, engine: Engine) -> Engine:
        self._engine = engine
        return self

    def decided(self, session: str) -> list[Round]:
        return [one for one in self.rounds[session] if one.decides]

    async def step(self, plan: StepPlan) -> list[Outcome]:
        if plan.rows:
            self.is_held = True
            await eventually(lambda: self.may_step(), "the next step may be made")
            self.is_held = False
        outcomes = await super().step(plan)
        accepted = {outcome.session: outcome.accepted for outcome in outcomes}
        for row in plan.rows:
            made = Round(row.start, row.known, row.drafted, accepted.get(row.session, 0), row.decide)
            self.rounds[row.session].append(made)
        return outcomes


@asynccontextmanager
async def watched(reading: StateReading, **options: Any) -> AsyncIterator[tuple[Cluster, RecordedEngine]]:
    """Yields a cluster of one target in lock step, and its recording engine.

    A step begins once every session has a drafter with all hidden states sent so far, so nothing depends on time.
    """
    engine = RecordedEngine()
    async with cluster(reading=reading, lock_step=True, wrap_engine=engine.wrap, **options) as c:
        c.hurry()
        (target,) = c.targets.values()
        engine.may_step = lambda: is_settled(target)
        yield c, engine


def is_settled(target: TargetReplica) -> bool:
    """Returns whether every cached session has a drafter that has received all hidden states sent."""
    sessions = target.scheduler.admission.running.values()
    feeds = [session.live_feed for session in sessions]
    return all(feed is not None and feed.acked == feed.sent for feed in feeds)


def acceptance(rounds: Iterable[Round]) -> float:
    """Returns the share of draft tokens accepted; fails if nothing was drafted."""
    made = list(rounds)
    drafted = sum(one.drafted for one in made)
    assert drafted > 0, f"nothing was drafted in {len(made)} rounds"
    return sum(one.accepted for one in made) / drafted


def computed(rounds: Iterable[Round]) -> int:
    """Returns the number of tokens added to the cache; recomputed tokens count again."""
    return sum(one.known + one.accepted for one in rounds)


def resumed(rounds: list[Round]) -> list[int]:
    """Returns the indices of rounds that follow a loss of cached tokens."""
    return [at for at in range(1, len(rounds)) if rounds[at].start < rounds[at - 1].end]
