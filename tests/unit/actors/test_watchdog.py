"""Loops report hanging steps and passes, by an injected clock, and end in time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.drafter import Drafter, DraftingThread, MethodFigures
from actors.target import TargetReplica
from cluster.costs import DraftCost, ForwardCost
from cluster.errors import EngineError
from cluster.verification.scheduler import VerificationLimits
from cluster.verification.step import Outcome, StepPlan
from cluster.watchdog import TimeoutPolicy
from protos.codec import Decoded
from protos.messages import Close, DraftRequest, Hello, Refusal, RefusalReason, Verdict
from protos.prefix import Prefix
from tests.unit.actors.test_drafter import InterruptedMethod, a_drafter, drafting, to_open, until
from tests.unit.cluster.samples import KEY, an_open

PASS_S = 1.0  # known duration of a drafting pass
STEP_S = 1.0
PROMPT_S = TimeoutPolicy().limit_s(PASS_S + PASS_S / 4)  # limit of a pass that also reads a prompt


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class HangingMethod(InterruptedMethod):
    """Method whose forward passes block until released."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on.set()
        self.drafting = threading.Event()
        self.forward = threading.Event()

    def draft(self, requests: Sequence[DraftRequest]) -> list[Any]:
        self.drafting.set()
        assert self.forward.wait(10)
        return super().draft(requests)


@asynccontextmanager
async def hanging(
    method: HangingMethod, clock: Clock, working_clock: Clock | None = None
) -> AsyncIterator[tuple[Drafter, str]]:
    """Returns a drafter in its first pass, with its router's stream."""
    figures = MethodFigures(cost=DraftCost(forward=ForwardCost.linear(PASS_S / 4)))
    drafter = a_drafter(method, clock=clock, thread=DraftingThread(clock=working_clock), figures=figures)
    async with drafting(drafter) as (stream, _):
        drafter.receive(stream, Decoded((to_open("a"),)))
        await until(method.drafting.is_set)
        yield drafter, stream
        method.forward.set()


async def test_a_pass_that_reads_a_prompt_has_time_for_it():
    clock = Clock()
    async with hanging(HangingMethod(), clock) as (drafter, _):
        clock.now = PROMPT_S
        assert drafter.stuck_s is None
        clock.now += 1
        assert drafter.stuck_s == clock.now


async def test_a_pass_that_waits_for_a_core_is_not_stuck_and_one_that_computes_for_ever_is():
    clock = Clock()
    worked = Clock()
    async with hanging(HangingMethod(), clock, worked) as (drafter, _):
        clock.now = 1e6
        assert drafter.stuck_s is None
        worked.now = PROMPT_S + 1
        assert drafter.stuck_s == worked.now


async def test_a_later_pass_is_limited_to_a_multiple_of_the_measured_duration():
    clock = Clock()
    method = HangingMethod()
    async with hanging(method, clock) as (drafter, _):
        method.forward.set()
        await until(lambda: method.proposed)
        method.forward.clear()
        method.drafting.clear()
        verdict = Verdict("a", 1, 2, Prefix(KEY, (1, 2)).hash, (3,), 0, 0)
        request = DraftRequest("a", 1, 3, Prefix(KEY, (1, 2, 3)).hash, max_tokens=4)
        drafter.receive("t1", Decoded((verdict, request)))
        await until(method.drafting.is_set)
        clock.now += TimeoutPolicy().limit_s(PASS_S)
        assert drafter.stuck_s is None
        clock.now += 1
        assert drafter.stuck_s == TimeoutPolicy().limit_s(PASS_S) + 1
        method.forward.set()
        await until(lambda: drafter.stuck_s is None)  # it was only slow


async def test_a_drafter_has_left_as_soon_as_its_sessions_are_moved():
    method = HangingMethod()
    async with hanging(method, Clock()) as (drafter, stream):
        method.forward.set()
        leaving = asyncio.create_task(drafter.leave(within_s=1e6))
        await until(lambda: method.proposed)
        assert not leaving.done()
        drafter.receive(stream, Decoded((Close("a", 1),)))
        await until(leaving.done)


class HangingEngine:
    """Engine whose only step hangs."""

    def __init__(self) -> None:
        self.stepping = asyncio.Event()

    async def step(self, plan: StepPlan) -> list[Outcome]:
        self.stepping.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def prepare(self, grammar: str) -> str | None:
        raise AssertionError(f"nobody asks for {grammar}")


def a_target(clock: Clock, step_timeout_s: float, step_cost: ForwardCost | None = None) -> tuple[TargetReplica, Any]:
    engine: Any = HangingEngine()
    limits = VerificationLimits(vocabulary=50, max_context=100, max_sessions=4, max_step_tokens=64)
    return TargetReplica(engine, limits, "v", "m", step_timeout_s, step_cost=step_cost, clock=clock), engine


@pytest.mark.parametrize("cost_s", [None, 0.001, STEP_S, 100.0])
async def test_a_steps_limit_is_a_multiple_of_its_expected_duration(cost_s: float | None) -> None:
    step_cost = None if cost_s is None else ForwardCost.linear(cost_s)
    limit_s = TimeoutPolicy().limit_s(cost_s)
    clock = Clock()
    replica, engine = a_target(clock, TimeoutPolicy().max_s, step_cost)
    stream, _ = replica.router_up(Hello("router", "v", "m"))
    loop = asyncio.create_task(replica.run())
    assert replica.stuck_s is None
    replica.receive(stream, Decoded((an_open("a"),)))
    await engine.stepping.wait()
    clock.now = limit_s
    assert replica.stuck_s is None
    clock.now += 1
    assert replica.stuck_s == limit_s + 1
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert replica.stuck_s is None


async def test_a_step_that_hangs_ends_the_replica() -> None:
    """A limit of zero ends the replica immediately, on the event loop's clock."""
    replica, _ = a_target(Clock(), step_timeout_s=0.0, step_cost=ForwardCost.linear(STEP_S))
    stream, _ = replica.router_up(Hello("router", "v", "m"))
    replica.receive(stream, Decoded((an_open("a"),)))
    with pytest.raises(EngineError, match="longer than 0 s, and was expected to take 1 s"):
        await replica.run()
    assert replica.failure is not None


async def test_a_target_without_drain_time_returns_its_sessions_at_once() -> None:
    replica, engine = a_target(Clock(), 60.0)
    stream, outbox = replica.router_up(Hello("router", "v", "m"))
    loop = asyncio.create_task(replica.run())
    replica.receive(stream, Decoded((an_open("a"),)))
    await engine.stepping.wait()
    await replica.leave(within_s=0.0)
    refusals = [message for message in await outbox.take() if isinstance(message, Refusal)]
    assert [(refusal.session, refusal.reason) for refusal in refusals] == [("a", RefusalReason.OVERLOADED)]
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
