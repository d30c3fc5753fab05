"""Application whose targets accept only chains for requests of `CHAIN` draft tokens, and count verified blocks.

A target with tree attention normally requests trees for every session, and answers do not tell which shape it used.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ray import serve

import serve_app.app
from actors.engine.executor import Engine
from cluster.config import SlipstreamConfig
from cluster.verification.step import Outcome, Row, StepPlan
from protos.messages import Open, Shape
from serve_app.deployments import TargetDeployment
from tests.integration.serving import Served

CHAIN = 4  # draft tokens
TREE = 8


class CountingEngine:
    """Engine that counts verified blocks by shape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def step(self, plan: StepPlan) -> list[Outcome]:
        outcomes = await self._engine.step(plan)
        deciding = [row for row in plan.rows if row.decide]
        for row, outcome in zip(deciding, outcomes, strict=True):
            if row.drafted:
                self.counts.update(traits(row, outcome))
        return outcomes


def traits(row: Row, outcome: Outcome) -> Iterator[str]:
    """Yields the names of the counters for a verified block."""
    draft = row.draft
    yield "chains" if draft.is_chain else "trees"
    if draft.is_chain and len(draft) > 1:
        yield "chains of several"
    if outcome.accepted > 1:
        yield "several accepted"
    along = tuple(draft.tokens[node] for node in outcome.path)
    if along != draft.main_path[: len(along)]:
        yield "accepted off the trunk"


class ShapedTarget(TargetDeployment):
    """Real target that requests one draft shape."""

    async def __init__(self, config: SlipstreamConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        await super().__init__(config)  # type: ignore[misc]
        self._counting = CountingEngine(self._replica._engine)
        self._replica._engine = self._counting
        scheduler = self._replica.scheduler
        of_others = scheduler._block_shape

        def shape(request: Open) -> Shape:
            return Shape.CHAIN if request.draft_tokens == CHAIN else of_others(request)

        scheduler._block_shape = shape  # type: ignore[method-assign]

    def verified(self) -> dict[str, int]:
        """Returns the counts of verified blocks by shape."""
        return dict(self._counting.counts)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Builds the application; runs in a separate process."""
    serve_app.app.TargetDeployment = ShapedTarget  # type: ignore[misc]
    return serve_app.app.build(args)


def verified(served: Served) -> Counter[str]:
    """Returns the counts, summed over all targets."""
    handle = serve.get_deployment_handle("Target", served.application)
    return sum(map(Counter, handle.broadcast("verified").results(timeout_s=20)), Counter())
