"""Target replica: a verification loop that connects the scheduler, the engine and the streams.

Each iteration plans a step from the messages received, runs it on the engine and sends the verdicts. This module is
independent of Ray; the engine may be a thread or a group of ranks. `GrammarGate` holds a session until its grammar is
compiled, so that no step waits for a grammar.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from actors.engine.executor import Engine, within
from actors.net.streams import Outbox, StatesOutbox
from actors.tracing import NO_TRACING, SessionSpans
from cluster.autoscaling import TargetReport
from cluster.costs import ForwardCost
from cluster.envelope import Send, peer_of, states_stream, stream_name
from cluster.errors import EngineError
from cluster.page_allocator import SessionMemory
from cluster.speculation.controller import PacingPolicy
from cluster.telemetry import Timeline
from cluster.trust import Refusals, ownership_refusal
from cluster.verification.scheduler import STOPPING_MESSAGE, VerificationLimits, VerificationScheduler
from cluster.verification.step import StepPlan
from cluster.watchdog import TimeoutPolicy, Watchdog
from protos.codec import Decoded
from protos.messages import Block, Close, Hello, Identity, Leaving, Message, Open, Refusal, RefusalReason, Welcome

Prepare = Callable[[str], Awaitable[str | None]]
"""Compiles a grammar for the engine; returns an error message, or None on success."""


@dataclass
class HeldSession:
    """A session waiting for its grammar, and the router's stream that opened it."""

    router: str
    open: Open
    task: asyncio.Task[None]


class GrammarGate:
    """Holds one target's sessions until their grammars are compiled.

    Then calls `release` with the router's stream and either the Open or a Refusal. Holds at most `limit` sessions. A
    session belongs to the router that opened it; `router_of` returns the router of an admitted session.
    """

    def __init__(
        self,
        prepare: Prepare,
        release: Callable[[str, Open | Refusal], None],
        router_of: Callable[[str], str | None],
        refusals: Refusals,
        limit: int,
    ) -> None:
        self._prepare = prepare
        self._release = release
        self._router_of = router_of
        self._refusals = refusals
        self._limit = limit
        self._held: dict[str, HeldSession] = {}  # by session

    def intercept(self, router: str, message: Message) -> list[Send] | None:
        """Returns the answers to a message that the gate handles; None if the caller must process it."""
        if isinstance(message, Open):
            return self._intercept_open(router, message)
        if isinstance(message, Close):
            self._close(router, message)
        return None

    def on_hello(self, router: str, hello: Hello) -> None:
        """Handles a router's new stream: moves its held sessions there and drops those that the Hello does not list."""
        live = {(item.session, item.attempt) for item in hello.live}
        for name, held in list(self._held.items()):
            if peer_of(held.router) != peer_of(router):
                continue
            held.router = router
            if (name, held.open.attempt) not in live:
                self._drop(name)

    def on_disconnect(self, router: str) -> None:
        """Drops the sessions held for a broken stream."""
        for name, held in list(self._held.items()):
            if held.router == router:
                self._drop(name)

    def refuse_all(self, why: str) -> list[Send]:
        """Drops all held sessions before a planned shutdown; returns their refusals."""
        held = list(self._held.values())
        for each in held:
            self._drop(each.open.session)
        refusals = [
            (each.router, Refusal(each.open.session, each.open.attempt, RefusalReason.OVERLOADED, why)) for each in held
        ]
        return [*refusals, *((router, Leaving()) for router in dict.fromkeys(each.router for each in held))]

    @property
    def is_empty(self) -> bool:
        return not self._held

    def _intercept_open(self, router: str, request: Open) -> list[Send] | None:
        """Holds a session with a grammar; a newer attempt replaces an older one."""
        name = request.session
        if (held := self._held.get(name)) is not None:
            if held.router != router:
                self._refusals.note(router, "an Open of another router's session", name)
                return [(router, ownership_refusal(request))]
            if held.open.attempt >= request.attempt:
                return []
            self._drop(name)
        if not request.grammar or self._router_of(name) not in (None, router):
            return None
        if len(self._held) >= self._limit:
            why = f"{len(self._held)} sessions wait for their grammars already"
            return [(router, Refusal(name, request.attempt, RefusalReason.OVERLOADED, why))]
        self._held[name] = HeldSession(router, request, asyncio.create_task(self._compile(request)))
        return []

    def _close(self, router: str, close: Close) -> None:
        """Drops a held session unless it belongs to another router or a newer attempt."""
        held = self._held.get(close.session)
        if held is not None and held.router == router and held.open.attempt <= close.attempt:
            self._drop(close.session)

    async def _compile(self, request: Open) -> None:
        why = await self._prepare(request.grammar)
        held = self._held.get(request.session)
        if held is None or held.open is not request:
            return  # dropped during the compilation, which cannot be cancelled
        del self._held[request.session]
        message = f"cannot enforce the grammar: {why}"
        refusal = Refusal(request.session, request.attempt, RefusalReason.INVALID, message)
        self._release(held.router, request if why is None else refusal)

    def _drop(self, session: str) -> None:
        self._held.pop(session).task.cancel()


STATES_BYTES_PER_STEP = 4 << 20  # maximum bytes of hidden states read between two steps
Computed = TypeVar("Computed")


class TargetReplica:
    """Serves sessions of routers by verifying blocks from drafters.

    Callers must present the fingerprints `vocabulary` and `target_model`. Set `memory` if the engine manages its own
    pages.
    """

    def __init__(
        self,
        engine: Engine,
        limits: VerificationLimits,
        vocabulary: str,
        target_model: str,
        step_timeout_s: float,
        pacing: PacingPolicy | None = None,
        step_cost: ForwardCost | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: SessionSpans = NO_TRACING,
        memory: SessionMemory | None = None,
    ) -> None:
        self.peer_id = f"target-{uuid.uuid4().hex[:12]}"
        self.identities = (Identity(vocabulary, target_model),)  # presented by callers
        self.scheduler = VerificationScheduler(limits, pacing, step_cost, memory)
        self.timeline = Timeline(clock)
        self.refused: Counter[str] = Counter()  # malformed messages by kind
        self.committed_tokens = 0  # tokens committed in steps, including those after a session's end
        self.failure: EngineError | None = None
        self._engine = engine
        self._gate = GrammarGate(
            engine.prepare,
            self._on_compiled,
            self.scheduler.admission.router_of,
            self.scheduler.refusals,
            limits.max_queued,
        )
        self._progress = Watchdog(TimeoutPolicy(max_s=step_timeout_s))
        self._clock = clock
        self._tracer = tracer
        self._outboxes: dict[str, Outbox] = {}  # by stream
        self._changed = asyncio.Event()
        self._left = asyncio.Event()  # set once all sessions have left a draining target
        self._streams = 0

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Verifies until cancelled; if the engine fails, stores its error in `failure` and raises it."""
        while True:
            is_fed = True
            if self.scheduler.settles_first:
                self._send(self.scheduler.settle())
                is_fed = await self._feed_drafters()
            plan = self.scheduler.plan(self._clock())
            if plan is not None:
                await self._step(plan)
            elif not self.scheduler.is_settled:
                self._send(self.scheduler.settle())
            elif is_fed:
                if self.scheduler.has_left:
                    self._left.set()
                await self._wait_until(self.scheduler.next_due())

    async def _step(self, plan: StepPlan) -> None:
        """Runs a step. While the engine computes, settles the previous step and sends its verdicts."""
        began = self._clock()
        computing = asyncio.ensure_future(self._engine.step(plan))
        self._send(self.scheduler.settle())
        sessions = [row.session for row in plan.rows]
        self.timeline.record("verify", *sessions)
        self._tracer.marked("verify", sessions, rows=len(sessions))
        outcomes = await self._compute(computing, self._expected_s(plan))
        now = self._clock()
        self.timeline.record("decided", *sessions)
        self.committed_tokens += sum([outcome.token_count for outcome in outcomes])
        self.scheduler.commit(outcomes, now - began, now)

    async def _feed_drafters(self) -> bool:
        """Sends drafters their missing hidden states, up to a byte limit per step.

        Returns True once every drafter has all existing states that its window admits.
        """
        left = STATES_BYTES_PER_STEP
        while (read := self.scheduler.feeds.next_read()) is not None:
            if left <= 0 and self.scheduler.feeds.recompute is None:
                return False
            rows = await self._compute(self._engine.read(read), None)
            left -= len(rows)
            self._send(self.scheduler.feeds.sent(read, rows))
        return True

    def _expected_s(self, plan: StepPlan) -> float | None:
        """Estimates a step's duration, in seconds, from measured costs; None without measurements."""
        rows = len(plan.rows)
        tokens = sum(len(row.tokens) for row in plan.rows)
        cost = self.scheduler.controller.load.step
        return max(cost.drafts_s(rows, tokens), cost.prompts_s(rows, tokens)) or None

    async def _compute(self, work: Awaitable[Computed], expected_s: float | None) -> Computed:
        limit_s = self._progress.begin_task(expected_s, self._clock())
        try:
            return await within(limit_s, work)
        except TimeoutError:
            expected = "" if expected_s is None else f", and was expected to take {expected_s:.3g} s"
            self.failure = EngineError(f"a step took longer than {limit_s:.3g} s{expected}")
            raise self.failure from None
        except EngineError as error:
            self.failure = error
            raise
        finally:
            self._progress.end_task()

    async def _wait_until(self, due: float | None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - self._clock())):
                await self._changed.wait()
        except TimeoutError:
            return  # a step or the expiry of a buffered message is due

    async def leave(self, within_s: float) -> None:
        """Refuses new sessions and continues open ones until routers have moved them.

        After `within_s` seconds, refuses the remaining sessions; routers reopen them elsewhere.
        """
        self._send([*self._gate.refuse_all(STOPPING_MESSAGE), *self.scheduler.leave()])
        self._changed.set()
        try:
            async with asyncio.timeout(within_s):
                await self._left.wait()
        except TimeoutError:
            self._send(self.scheduler.refuse_rest())
            self._changed.set()

    def _send(self, sends: list[Send]) -> None:
        for stream, message in sends:
            self._tracer.on_sent(stream, message)
            if outbox := self._outboxes.get(stream):
                outbox.put(message)

    # ------------------------------------------------------------ streams

    def router_up(self, hello: Hello) -> tuple[str, Outbox]:
        """Handles a router's new stream; drops the router's sessions that its Hello does not list."""
        stream, outbox = self._open_stream(hello)
        self._gate.on_hello(stream, hello)
        self.scheduler.receive(stream, hello, self._clock())
        self._changed.set()
        return stream, outbox

    def drafter_up(self, hello: Hello) -> tuple[str, Outbox]:
        """Handles a drafter's new stream. The drafter may attach to sessions, but not open or close them."""
        return self._open_stream(hello)

    def _open_stream(self, hello: Hello) -> tuple[str, Outbox]:
        """Names a peer's new stream and welcomes the peer."""
        self._streams += 1
        stream = stream_name(hello.peer_id, self._streams)
        outbox = Outbox()
        self._outboxes[stream] = outbox
        outbox.put(Welcome(self.peer_id))
        return stream, outbox

    def states_up(self, hello: Hello) -> tuple[str, Outbox]:
        """Handles a drafter's new stream for hidden states."""
        self._streams += 1
        stream = stream_name(hello.peer_id, self._streams)
        outbox = StatesOutbox()
        self._outboxes[states_stream(stream)] = outbox
        outbox.put(Welcome(self.peer_id))
        return stream, outbox

    def states_down(self, stream: str, outbox: Outbox) -> None:
        if self._outboxes.get(states_stream(stream)) is outbox:
            del self._outboxes[states_stream(stream)]

    def receive(self, stream: str, frame: Decoded) -> int:
        """Handles the messages of one frame; returns the number of unrequested ones."""
        now = self._clock()
        before = self.scheduler.counts.unrequested
        self._count_malformed(stream, frame)
        for message in frame.messages:
            if isinstance(message, Block):
                self.timeline.record("block", message.session)
            self._tracer.on_received(stream, message)
            answers = None if self.scheduler.is_leaving else self._gate.intercept(stream, message)
            self._send(self.scheduler.receive(stream, message, now) if answers is None else answers)
        self._changed.set()
        return self.scheduler.counts.unrequested - before

    def _on_compiled(self, stream: str, answer: Open | Refusal) -> None:
        is_open = isinstance(answer, Open)
        self._send(self.scheduler.receive(stream, answer, self._clock()) if is_open else [(stream, answer)])
        self._changed.set()

    def stream_down(self, stream: str) -> None:
        self._gate.on_disconnect(stream)
        self.scheduler.gone(stream, self._clock())
        self._tracer.gone(stream)
        del self._outboxes[stream]
        self._changed.set()

    def _count_malformed(self, stream: str, frame: Decoded) -> None:
        """Counts malformed messages; answers a malformed Open with a Refusal, so that its router does not wait."""
        for item in frame.malformed:
            self.refused[item.kind] += 1
            self.scheduler.refusals.log_once(stream, f"a malformed {item.kind}", item.why)
            if item.kind == "Open":
                self._send([(stream, Refusal(item.session, item.attempt, RefusalReason.INVALID, item.why))])

    # ------------------------------------------------------------ inspection

    def report(self) -> TargetReport:
        """Returns the load since the previous report, for autoscaling."""
        return self.scheduler.report(self._clock())

    @property
    def stuck_s(self) -> float | None:
        """Seconds since the current step exceeded its limit; None if it has not."""
        return self._progress.stuck_s(self._clock())

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and self._gate.is_empty
