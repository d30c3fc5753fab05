"""A target replica: the verification loop around the scheduler, the engine and the streams.

Reads top to bottom: messages come in, a step is planned, the engine computes, verdicts go out. Knows nothing of
Ray: the engine may be threads or ranks.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.engine.engine import Engine
from actors.transport.streams import Outbox, StatesOutbox
from cluster.autoscaling.reports import TargetReport
from cluster.costs import ForwardCost
from cluster.dispatch import Send, states_stream, stream_name
from cluster.errors import EngineError
from cluster.pacing.policy import Pacing
from cluster.session_memory import SessionMemory
from cluster.telemetry import Timeline
from cluster.trust.refusals import Refusals
from cluster.verification.bounds import VerificationLimits
from cluster.verification.scheduler import VerificationScheduler
from cluster.verification.step import StepPlan
from protos.codec import Decoded
from protos.messages import Block, Hello, Refusal, RefusalReason, Welcome

TURN_BYTES = 4 << 20  # of hidden states that are read between two steps: as many as a step's chunk of a prompt has
Computed = TypeVar("Computed")


class TargetReplica:
    """Serves sessions for routers, with blocks from drafters.

    `vocabulary` and `target_model` are the fingerprints that callers must share. `memory` is the engine's, if it keeps
    its pages itself.
    """

    def __init__(
        self,
        engine: Engine,
        limits: VerificationLimits,
        vocabulary: str,
        target_model: str,
        step_timeout_s: float,
        pacing: Pacing | None = None,
        step_cost: ForwardCost | None = None,
        clock: Callable[[], float] = time.monotonic,
        memory: SessionMemory | None = None,
    ) -> None:
        self.peer_id = f"target-{uuid.uuid4().hex[:12]}"
        self.vocabulary = vocabulary
        self.target_model = target_model
        self.scheduler = VerificationScheduler(limits, pacing, step_cost, memory)
        self.timeline = Timeline(clock)
        self.refused: Counter[str] = Counter()  # malformed messages, by kind
        self.failure: EngineError | None = None
        self._engine = engine
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._outboxes: dict[str, Outbox] = {}  # by stream
        self._changed = asyncio.Event()
        self._streams = 0

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Verifies until cancelled; a failing engine is remembered in `failure` and raised."""
        while True:
            is_fed = await self._feed_drafters()
            plan = self.scheduler.plan(self._clock())
            if plan is not None:
                await self._step(plan)
            elif is_fed:
                await self._wait_until(self.scheduler.next_due())

    async def _step(self, plan: StepPlan) -> None:
        sessions = [row.session for row in plan.rows]
        self.timeline.record("verify", *sessions)
        began = self._clock()
        outcomes = await self._compute(self._engine.step(plan))
        now = self._clock()
        self.timeline.record("decided", *sessions)
        self._send(self.scheduler.apply(outcomes, now - began, now))
        await asyncio.sleep(0)  # verdicts leave, and what arrived meanwhile is heard, before the next plan

    async def _feed_drafters(self) -> bool:
        """Between two steps, once verdicts have left: the hidden states that drafters lack, for a while.

        Returns whether they have all that there is and that they have room for.
        """
        left = TURN_BYTES
        while (asked := self.scheduler.feeds.next_read()) is not None:
            if left <= 0 and self.scheduler.feeds.fresh is None:
                return False
            rows = await self._compute(self._engine.read(asked))
            left -= len(rows)
            self._send(self.scheduler.feeds.sent(asked, rows))
        return True

    async def _compute(self, work: Awaitable[Computed]) -> Computed:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                return await work
        except TimeoutError as error:
            self.failure = EngineError(f"a step took longer than {self._step_timeout_s} s")
            raise self.failure from error
        except EngineError as error:
            self.failure = error
            raise

    async def _wait_until(self, due: float | None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - self._clock())):
                await self._changed.wait()
        except TimeoutError:
            return  # the patience with some block is over

    def _send(self, sends: list[Send]) -> None:
        for stream, message in sends:
            if outbox := self._outboxes.get(stream):
                outbox.put(message)

    # ------------------------------------------------------------ streams

    def router_up(self, hello: Hello) -> tuple[str, Outbox]:
        """A router's stream begins: of its sessions only those that it lists stay."""
        stream, outbox = self.drafter_up(hello)
        self.scheduler.receive(stream, hello, self._clock())
        self._changed.set()
        return stream, outbox

    def drafter_up(self, hello: Hello) -> tuple[str, Outbox]:
        """A drafter's stream begins. It attaches to sessions, and has no say about those of routers."""
        self._streams += 1
        stream = stream_name(hello.peer_id, self._streams)
        outbox = Outbox()
        self._outboxes[stream] = outbox
        outbox.put(Welcome(self.peer_id))
        return stream, outbox

    def states_up(self, hello: Hello) -> tuple[str, Outbox]:
        """A drafter's stream for hidden states begins; it takes the place of an older one."""
        self._streams += 1
        stream = stream_name(hello.peer_id, self._streams)
        outbox = StatesOutbox()
        self._outboxes[states_stream(stream)] = outbox
        outbox.put(Welcome(self.peer_id))
        return stream, outbox

    def states_down(self, stream: str, outbox: Outbox) -> None:
        if self._outboxes.get(states_stream(stream)) is outbox:
            del self._outboxes[states_stream(stream)]

    def receive(self, stream: str, frame: Decoded) -> None:
        """Everything that a peer has for this target at one moment."""
        now = self._clock()
        self._count_malformed(stream, frame)
        for message in frame.messages:
            if isinstance(message, Block):
                self.timeline.record("block", message.session)
            self._send(self.scheduler.receive(stream, message, now))
        self._changed.set()

    def stream_down(self, stream: str) -> None:
        self.scheduler.gone(stream, self._clock())
        del self._outboxes[stream]
        self._changed.set()

    def _count_malformed(self, stream: str, frame: Decoded) -> None:
        """Refuses what could not be read; an Open is answered, so that nobody waits for it."""
        for item in frame.malformed:
            self.refused[item.kind] += 1
            self.refusals.log_once(stream, f"a malformed {item.kind}", item.why)
            if item.kind == "Open":
                self._send([(stream, Refusal(item.session, item.attempt, RefusalReason.INVALID, item.why))])

    # ------------------------------------------------------------ inspection

    def report(self) -> TargetReport:
        """For autoscaling, of the time since it was last asked for."""
        return self.scheduler.report(self._clock())

    @property
    def refusals(self) -> Refusals:
        """Of who may not do what it wanted."""
        return self.scheduler.refusals

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle
