"""Audits over real streams detect a damaged cache, pass a correct target, and yield to requests."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from actors.compute.kv_cache import InputRow
from actors.engine.runner import ModelRunner
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.config import AuditConfig
from cluster.page_allocator import PageCopy, SlotMove
from protos.messages import Acceptance, Sampling
from tests.integration.harness import PAGE_SIZE, PAGES, Cluster, cluster, eventually
from tests.unit.actors.tiny_models import MODELS, jittered

ALL = AuditConfig(share=1.0)
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.95)


class DamagedRunner:
    """Runner that zeroes the first cache page of every text longer than `length`."""

    def __init__(self, runner: ModelRunner, length: int) -> None:
        self.vocabulary = runner.vocabulary
        self._runner = runner
        self._length = length

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        *,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        for layer in self._runner.cache._layers.values():
            for row in rows:
                if row.start >= self._length:
                    layer[row.pages[0] * PAGE_SIZE :][:PAGE_SIZE] = 0
        return self._runner.forward(rows, copies, moves=moves, draws=draws)

    def read_states(self, slots: Sequence[int]) -> bytes:
        return self._runner.read_states(slots)


def a_runner() -> ModelRunner:
    """Returns a runner of the same model with its own cache."""
    torch.manual_seed(3)
    return ModelRunner(jittered(MODELS["llama"]()), PAGES, PAGE_SIZE)


def audited(c: Cluster) -> int:
    counts = c.router.audits.counts
    return counts["equal"] + counts["near_tie"] + counts["differs"]


async def serve_some(c: Cluster, sampling: Sampling, count: int = 4) -> None:
    c.pace.step_s = 0.005
    asked = [c.generation(prompt=(1 + i, 2, 3), sampling=sampling, seed=i) for i in range(count)]
    await asyncio.gather(*(c.tokens(generation) for generation in asked))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("targets", [1, 2])
async def test_a_correct_target_passes_every_audit(sampling, targets):
    async with cluster(targets=targets, audit=ALL, target_runner=lambda _: a_runner()) as c:
        await serve_some(c, sampling)
        await eventually(lambda: audited(c) == 4, "all are audited")
        assert c.differences == []
        assert c.router.audits.state == "ok"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_another_target_detects_a_damaged_cache(sampling):
    def runner(index: int) -> ModelRunner | DamagedRunner:
        return DamagedRunner(a_runner(), 20) if index == 0 else a_runner()

    async with cluster(targets=2, audit=ALL, target_runner=runner) as c:
        damaged, whole = c.targets
        await serve_some(c, sampling)
        await eventually(lambda: audited(c) == 4, "all are audited")
        found = [difference for difference in c.differences if difference.served_by == (damaged,)]
        assert found, "what the damaged one served is another text"
        for difference in c.differences:
            assert difference.position + difference.prompt_len >= 20, "before that it was whole"
            assert {*difference.served_by, difference.audited_by} == {damaged, whole}
            assert difference.committed[0] != difference.plain[0]
            assert difference.margin is not None
            assert difference.margin > 0.002
        assert c.router.audits.state == "differs"


async def test_rejection_sampled_answers_are_not_audited():
    async with cluster(audit=ALL) as c:
        await c.tokens(c.generation(sampling=SAMPLED, acceptance=Acceptance.REJECTION))
        assert c.router.audits.counts["rejection"] == 1
        assert c.router.audits.waiting == 0


async def test_an_audit_stops_for_a_request_and_resumes_afterwards():
    """Audit steps take as long as others, so a request that waited for an audit would be visible."""
    async with cluster(audit=ALL) as c:
        (target,) = c.targets.values()
        running = target.scheduler.admission.running
        await c.tokens(c.generation(max_len=103))
        await eventually(lambda: any(s.open.audit for s in running.values()), "the audit runs")
        asked = asyncio.create_task(c.tokens(c.generation(max_len=23)))
        await eventually(lambda: any(not s.open.audit for s in running.values()), "the request runs")
        while not asked.done():
            assert not any(s.open.audit for s in running.values()), "an audit runs beside a request"
            await asyncio.sleep(0)
        await asked
        c.hurry()
        await eventually(lambda: audited(c) == 2, "both are audited")
        assert c.differences == []


async def test_an_audit_survives_the_loss_of_its_target():
    async with cluster(targets=2, audit=ALL) as c:
        await c.tokens(c.generation(max_len=103))
        await eventually(lambda: c.router.audits._running is not None, "the audit runs")
        await c.servers[c.router.audits._target].stop(0)
        c.hurry()
        await eventually(lambda: audited(c) == 1, "the other target audits, though it served the request itself")
        assert c.differences == []
