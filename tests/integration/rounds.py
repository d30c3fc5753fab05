"""Records a target engine's plans and outcomes by session; lets steps wait for a test's signal."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from actors.engine.executor import Engine
from actors.target import TargetReplica
from cluster.verification.step import Outcome, StateRead, StepPlan
from tests.integration.harness import eventually


@dataclass(frozen=True)
class Round:
    """A session's row of one step. Counts are of tokens."""

    start: int  # that were in the cache before
    known: int  # that were computed although no draft of them was verified
    drafted: int
    accepted: int
    decides: bool

    @property
    def end(self) -> int:
        """Tokens that are in the cache and stand, after it."""
        return self.start + self.known + self.accepted


class RecordedEngine:
    """Makes a step as soon as `may_step` says so, and remembers it."""

    def __init__(self) -> None:
        self.rounds: defaultdict[str, list[Round]] = defaultdict(list)  # by session
        self.may_step: Callable[[], bool] = lambda: True
        self.is_held = False  # whether a step that is planned waits
        self._engine: Engine | None = None

    def wrap(self, engine: Engine) -> Engine:
        self._engine = engine
        return self

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "it was given to a cluster"
        return self._engine

    def decided(self, session: str) -> list[Round]:
        return [one for one in self.rounds[session] if one.decides]

    async def step(self, plan: StepPlan) -> list[Outcome]:
        if plan.rows:
            self.is_held = True
            await eventually(lambda: self.may_step(), "the next step may be made")
            self.is_held = False
        outcomes = await self.engine.step(plan)
        accepted = {outcome.session: outcome.accepted for outcome in outcomes}
        for row in plan.rows:
            made = Round(row.start, row.known, row.drafted, accepted.get(row.session, 0), row.decide)
            self.rounds[row.session].append(made)
        return outcomes

    async def read(self, asked: StateRead) -> bytes:
        return await self.engine.read(asked)

    async def prepare(self, grammar: str) -> str | None:
        return await self.engine.prepare(grammar)

    async def close(self) -> None:
        await self.engine.close()


def is_settled(target: TargetReplica) -> bool:
    """Returns whether every cached session has a drafter that has received all hidden states sent."""
    sessions = target.scheduler._admission.running.values()
    feeds = [session.live_feed for session in sessions]
    return all(feed is not None and feed.acked == feed.sent for feed in feeds)


def acceptance(rounds: Iterable[Round]) -> float:
    """Share of the draft tokens, of which there must be some."""
    made = list(rounds)
    drafted = sum(one.drafted for one in made)
    assert drafted > 0, f"nothing was drafted in {len(made)} rounds"
    return sum(one.accepted for one in made) / drafted


def computed(rounds: Iterable[Round]) -> int:
    """Tokens that came to stand in the cache, each as often as it did."""
    return sum(one.known + one.accepted for one in rounds)


def resumed(rounds: list[Round]) -> list[int]:
    """Indices of rounds before which the session had lost some of its cache."""
    return [at for at in range(1, len(rounds)) if rounds[at].start < rounds[at - 1].end]
