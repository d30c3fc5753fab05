"""Router, drafters and targets in one process: real loops and gRPC on loopback, with toy models."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from actors.drafter import Drafter, TargetAccess
from actors.drafters.model.draft_model import DraftModel
from actors.engine.executor import Engine, StepExecutor, ThreadEngine
from actors.engine.runner import Runner
from actors.grammars import GrammarCompiler
from actors.net.credentials import credentials_of
from actors.servers import GrpcServer, serve_drafter, serve_target
from actors.target import TargetReplica
from actors.tracing import NO_TRACING, SessionSpans
from cluster.audit import Audits, Difference
from cluster.config import AuditConfig
from cluster.config_sections import TrustConfig
from cluster.drafting.hidden_state_receiver import NO_BOUNDS, StateBounds
from cluster.drafting.method import DraftingMethod
from cluster.drafting.session_table import DrafterLimits
from cluster.learning import Example
from cluster.routing.ledger import CommittedTokens, Ended, Generation
from cluster.routing.membership import Endpoint, Members
from cluster.speculation.controller import Adaptive, LockStep
from cluster.trust import PeerRole
from cluster.verification.scheduler import VerificationLimits
from cluster.verification.step import Outcome, StateRead, StepPlan
from protos.codec import Decoded
from protos.messages import Attach, Close, Identity, Open, Sampling, StatesFormat
from serve_app.router import Router, RouterLimits
from tests.lossless.states import LAYOUT, ReadingMethod, RememberingRunner
from tests.session_events import events_of
from tests.static_membership import StaticMembership
from tests.toys import ToyRunner, a_generation, toy_draft_model

VOCABULARY = 32
CONTEXT = 512
SESSIONS = 16
PAGE_SIZE = 16
PAGES = SESSIONS * CONTEXT // PAGE_SIZE  # for all sessions at maximum length
PATIENCE_S = 60  # maximum wait of a lock-step step for a block
IDENTITY = Identity("toy-vocabulary", "toy-target")
LOGITS = 2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5))


@dataclass
class Pace:
    """Step durations of a cluster's targets."""

    # Without a pause, toy steps are instant; waiting for a block would not pay off, and the target would not speculate.
    step_s: float = 0.03


@dataclass
class Cluster:
    """Running cluster, with targets and drafters by address."""

    router: Router
    pace: Pace
    targets: dict[str, TargetReplica] = field(default_factory=dict)
    drafters: dict[str, Drafter] = field(default_factory=dict)
    servers: dict[str, GrpcServer] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)  # found by the router's audits
    _names: "count[int]" = field(default_factory=count)

    def generation(self, **changes: object) -> Generation:
        """Returns a generation of 40 greedy tokens, with the given `changes`."""
        greedy = Sampling(temperature=0.0)
        return a_generation(**{"session": f"session-{next(self._names)}", "sampling": greedy, **changes})

    def hurry(self) -> None:
        """Removes the pause in each step, so that remaining work finishes quickly."""
        self.pace.step_s = 0.0

    async def tokens(self, generation: Generation) -> list[int]:
        """Returns all committed tokens of the session; fails unless it ends normally."""
        tokens: list[int] = []
        async for event in events_of(self.router, generation):
            if isinstance(event, CommittedTokens):
                tokens += event.tokens
            else:
                assert isinstance(event, Ended)
        return tokens

    @property
    def accepted(self) -> int:
        """Returns the number of draft tokens that the targets have accepted."""
        return sum(target.scheduler.counts.accepted_tokens for target in self.targets.values())


class WrappedEngine:
    """Engine that delegates to another engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def step(self, plan: StepPlan) -> list[Outcome]:
        return await self._engine.step(plan)

    async def read(self, asked: StateRead) -> bytes:
        return await self._engine.read(asked)

    async def prepare(self, grammar: str) -> str | None:
        return await self._engine.prepare(grammar)

    async def close(self) -> None:
        await self._engine.close()


class PacedEngine(WrappedEngine):
    """Engine whose steps take as long as a real model's until the cluster hurries."""

    def __init__(self, engine: Engine, pace: "Pace") -> None:
        super().__init__(engine)
        self._pace = pace

    async def step(self, plan: StepPlan) -> list[Outcome]:
        if plan.rows:
            await asyncio.sleep(self._pace.step_s)
        return await super().step(plan)


class AttendedEngine(WrappedEngine):
    """Engine that starts a step only after a drafter has attached to each of its speculative sessions.

    Otherwise the number of tokens committed before a drafter attaches would depend on the machine.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._unattended: set[str] = set()  # sessions opened with drafts, before a drafter attached
        self._early: set[str] = set()  # sessions that a drafter attached to before the router's Open arrived

    def observe(self, replica: TargetReplica) -> None:
        """Taps the target's messages."""
        receive = replica.receive

        def tap(stream: str, frame: Decoded) -> None:
            for message in frame.messages:
                if isinstance(message, Open) and message.draft_tokens and not message.audit:
                    if message.session not in self._early:
                        self._unattended.add(message.session)
                    self._early.discard(message.session)
                elif isinstance(message, Attach):
                    if message.session not in self._unattended:
                        self._early.add(message.session)
                    self._unattended.discard(message.session)
                elif isinstance(message, Close):
                    self._unattended.discard(message.session)
                    self._early.discard(message.session)
            receive(stream, frame)

        replica.receive = tap  # type: ignore[method-assign]

    async def step(self, plan: StepPlan) -> list[Outcome]:
        with suppress(TimeoutError):  # without any drafter, the target continues alone
            async with asyncio.timeout(10):
                while any(row.session in self._unattended for row in plan.rows):
                    await asyncio.sleep(0.001)
        return await super().step(plan)


def plain_greedy(prompt: tuple[int, ...], length: int, logits: Tensor = LOGITS) -> list[int]:
    """Returns the expected text, computed independently of the schedulers."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(logits[tokens[-1]].argmax()))
    return tokens[len(prompt) :]


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits until the condition holds; fails after ten seconds."""
    try:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited in vain until {what}") from None


def a_draft_model(logits: Tensor, grammars: GrammarCompiler | None = None) -> DraftModel:
    return toy_draft_model(ToyRunner(logits), PAGES, PAGE_SIZE, top_k=8, grammars=grammars)


@dataclass(frozen=True)
class StateReading:
    """Setup of a target that captures hidden states, and of drafters that read them."""

    runner: Callable[[int], Runner]  # creates a target's runner, given the number of pages
    method: Callable[[], DraftingMethod]
    bounds: StateBounds = NO_BOUNDS
    layout: StatesFormat = LAYOUT


CHECKED = StateReading(
    lambda pages: RememberingRunner(LOGITS, pages, PAGE_SIZE), lambda: ReadingMethod(a_draft_model(LOGITS))
)
"""Drafts with a model, and compares each row of hidden states with its text."""


@asynccontextmanager
async def cluster(
    targets: int = 1,
    drafters: int = 1,
    logits: Tensor = LOGITS,  # target model's logits, by latest token
    draft_logits: Tensor | None = None,  # draft model's logits; default: the target model's
    context: int = CONTEXT,
    wrap_engine: Callable[[Engine], Engine] = lambda engine: engine,
    pages: int = PAGES,
    target_wait_s: float = 5,
    lock_step: bool = False,
    audit: AuditConfig | None = None,
    target_runner: Callable[[int], Runner] | None = None,
    wrap_method: Callable[[DraftingMethod], DraftingMethod] = lambda method: method,
    reading: StateReading | None = None,  # if the drafters' method reads hidden states
    trust: TrustConfig | None = None,
    dials_any: bool = True,  # whether drafters dial addresses other than targets'
    grammars: GrammarCompiler | None = None,  # over the vocabulary
    sessions: int = SESSIONS,  # concurrent sessions per target and per drafter
    tracer: Callable[[str], SessionSpans] = lambda _: NO_TRACING,  # by service name
    examples: Callable[[Example], None] | None = None,  # receives sessions for training drafts
) -> AsyncIterator[Cluster]:
    """Runs a cluster; before it stops, asserts that no session or page remains.

    In lock step, every step waits for its drafts, so acceptance does not depend on the machine's speed.
    """
    tasks: list[asyncio.Task[None]] = []
    replicas: dict[str, TargetReplica] = {}
    drafting: dict[str, Drafter] = {}
    servers: dict[str, GrpcServer] = {}
    engines: list[ThreadEngine] = []
    pace = Pace()
    layout = None if reading is None else reading.layout
    trust = trust or TrustConfig()
    vocabulary = len(logits)
    drawn = logits if draft_logits is None else draft_logits
    for index in range(targets):
        if reading is not None:
            runner = reading.runner(pages)
        else:
            runner = ToyRunner(logits) if target_runner is None else target_runner(index)
        engines.append(ThreadEngine(StepExecutor(runner, vocabulary, grammars=grammars)))
        limits = VerificationLimits(
            vocabulary, context, sessions, max_step_tokens=4 * sessions, pages=pages, page_size=PAGE_SIZE, states=layout
        )
        attended = AttendedEngine(PacedEngine(engines[-1], pace))
        engine = wrap_engine(attended)
        pacing = LockStep(patience=PATIENCE_S) if lock_step else Adaptive()
        replica = TargetReplica(
            engine, limits, IDENTITY.vocabulary, IDENTITY.target_model, 30, pacing, tracer=tracer("target")
        )
        if lock_step and drafters:
            attended.observe(replica)
        server = await serve_target(replica, "127.0.0.1", trust=trust)
        replicas[server.address] = replica
        servers[server.address] = server
        tasks.append(asyncio.create_task(replica.run()))
    for _ in range(drafters):
        method = a_draft_model(drawn, grammars) if reading is None else reading.method()
        drafter = Drafter(
            wrap_method(method),
            DrafterLimits(vocabulary, context, sessions, layout, NO_BOUNDS if reading is None else reading.bounds),
            {"": IDENTITY, "toy": IDENTITY},  # sessions over HTTP name their model
            draft_ahead=not lock_step,
            access=TargetAccess(
                credentials=credentials_of(trust, PeerRole.DRAFTER),
                known=None if dials_any else lambda _: frozenset(replicas),
            ),
            tracer=tracer("drafter"),
        )
        server = await serve_drafter(drafter, "127.0.0.1", trust=trust)
        drafting[server.address] = drafter
        servers[server.address] = server
        tasks.append(asyncio.create_task(drafter.run()))
    members = Members(
        tuple(Endpoint(address, address) for address in replicas),
        tuple(Endpoint(address, address) for address in drafting),
    )
    differences: list[Difference] = []
    audits = Audits(audit or AuditConfig(), "float32", differences.append)
    limits_of_router = RouterLimits(max_sessions=100, target_wait_s=target_wait_s)
    shown = credentials_of(trust, PeerRole.ROUTER)
    router = Router(
        StaticMembership(members),
        IDENTITY,
        limits_of_router,
        audits,
        credentials=shown,
        tracer=tracer("router"),
        examples=examples,
    )
    tasks.append(asyncio.create_task(router.run()))
    whole = Cluster(router, pace, replicas, drafting, servers, differences)
    try:
        await eventually(lambda: len(router.reachable) == targets + drafters, "the router reaches everyone")
        yield whole
        await eventually(lambda: router.is_idle, "the router is idle")
        for replica in replicas.values():
            await eventually(lambda r=replica: r.is_idle, "a target is idle")  # type: ignore[misc]
            replica.scheduler.admission.pages.check()
        for drafter in drafting.values():
            await eventually(lambda d=drafter: d.is_idle, "a drafter is idle")  # type: ignore[misc]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await router.close()
        for drafter in drafting.values():
            await drafter.close()
        for server in servers.values():
            await server.stop(0)
        for computing in engines:
            await computing.close()
