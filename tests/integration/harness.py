"""Router, drafters and targets with real loops over real gRPC on loopback, in one process, around toy models."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from actors.drafter import Drafter, TargetAccess
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.sampling import DraftingLimits
from actors.engine.executor import Engine, StepExecutor, ThreadEngine
from actors.engine.runner import Runner
from actors.grammars import GrammarCompiler
from actors.models.decoder import ToyRunner
from actors.net.credentials import credentials_of
from actors.servers import GrpcServer, serve_drafter, serve_target
from actors.target import TargetReplica
from cluster.audit import Audits, Difference
from cluster.config import AuditConfig
from cluster.config_sections import TrustConfig
from cluster.drafting.hidden_state_receiver import NO_BOUNDS, StateBounds
from cluster.drafting.method import DraftingMethod
from cluster.drafting.session_table import DrafterLimits
from cluster.learning import Example
from cluster.routing.ledger import CommittedTokens, Ended, Generation
from cluster.routing.membership import Endpoint, Members, StaticMembership
from cluster.speculation.controller import Adaptive, ReferenceLoop
from cluster.tracing import NoTracing, SessionTracer
from cluster.trust import PeerRole
from cluster.verification.scheduler import VerificationLimits
from cluster.verification.step import Outcome, StateRead, StepPlan
from protos.messages import Acceptance, Sampling
from serve_app.router import Identity, Router, RouterLimits
from tests.lossless.states import LAYOUT, ReadingMethod, RememberingRunner

VOCABULARY = 32
CONTEXT = 512
SESSIONS = 16
PAGE_SIZE = 16
PAGES = SESSIONS * CONTEXT // PAGE_SIZE  # for all sessions at their longest
IDENTITY = Identity("toy-vocabulary", "toy-target")
LOGITS = 2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5))


@dataclass
class Pace:
    """Step durations of a cluster's targets."""

    # A toy step is instant, and then waiting for a block would not pay: the target would decode plainly.
    step_s: float = 0.03


@dataclass
class Cluster:
    """A running cluster; `targets` and `drafters` are by address."""

    router: Router
    pace: Pace
    targets: dict[str, TargetReplica] = field(default_factory=dict)
    drafters: dict[str, Drafter] = field(default_factory=dict)
    servers: dict[str, GrpcServer] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)  # that the router's audits found
    _names: "count[int]" = field(default_factory=count)

    def generation(self, **changes: object) -> Generation:
        """A session of 40 greedy tokens, unless `changes` say otherwise."""
        values: dict[str, object] = {
            "session": f"session-{next(self._names)}",
            "prompt": (1, 2, 3),
            "max_len": 43,
            "stop_ids": (),
            "sampling": Sampling(temperature=0.0),
            "seed": 1,
            "draft_seed": 2,
            "choice": 0,
            "hash_key": 3,
            "acceptance": Acceptance.COUPLED,
            "draft_tokens": 4,
        }
        return Generation(**{**values, **changes})  # type: ignore[arg-type]

    def hurry(self) -> None:
        """Lets remaining work finish as fast as it can, once the test has seen what it wanted."""
        self.pace.step_s = 0.0

    async def tokens(self, generation: Generation) -> list[int]:
        """Everything that the session commits; fails unless it ends properly."""
        tokens: list[int] = []
        async for event in self.router.generate(generation):
            if isinstance(event, CommittedTokens):
                tokens += event.tokens
            else:
                assert isinstance(event, Ended)
        return tokens


class PacedEngine:
    """Makes steps take as long as a real model's, until the cluster hurries."""

    def __init__(self, engine: Engine, pace: "Pace") -> None:
        self._engine = engine
        self._pace = pace

    async def step(self, plan: StepPlan) -> list[Outcome]:
        if plan.rows:
            await asyncio.sleep(self._pace.step_s)
        return await self._engine.step(plan)

    async def read(self, asked: StateRead) -> bytes:
        return await self._engine.read(asked)

    async def prepare(self, grammar: str) -> str | None:
        return await self._engine.prepare(grammar)

    async def close(self) -> None:
        await self._engine.close()


def as_it_is(engine: Engine) -> Engine:
    return engine


def plain_greedy(prompt: tuple[int, ...], length: int, logits: Tensor = LOGITS) -> list[int]:
    """The reference, without any of our loops."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(logits[tokens[-1]].argmax()))
    return tokens[len(prompt) :]


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that must come true; fails after ten seconds."""
    try:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited in vain until {what}") from None


def a_draft_model(logits: Tensor, grammars: GrammarCompiler | None = None) -> DraftModel:
    return DraftModel(
        ToyRunner(logits),
        torch.arange(VOCABULARY),
        DraftCache(PAGES, PAGE_SIZE),
        DraftingLimits(top_k=8),
        makers=() if grammars is None else (grammars.draft_masking,),
    )


@dataclass(frozen=True)
class StateReading:
    """A target whose states can be read, and drafters whose method reads them."""

    runner: Callable[[int], Runner]  # of a target with so many pages
    method: Callable[[], DraftingMethod]
    bounds: StateBounds = NO_BOUNDS


CHECKED = StateReading(
    lambda pages: RememberingRunner(LOGITS, pages, PAGE_SIZE), lambda: ReadingMethod(a_draft_model(LOGITS))
)
"""Drafts are a model's, and each row is held against the text that it has to be of."""


@asynccontextmanager
async def cluster(
    targets: int = 1,
    drafters: int = 1,
    draft_logits: Tensor = LOGITS,
    wrap_engine: Callable[[Engine], Engine] = as_it_is,
    pages: int = PAGES,
    target_wait_s: float = 5,
    lock_step: bool = False,
    audit: AuditConfig | None = None,
    target_runner: Callable[[int], Runner] = lambda _: ToyRunner(LOGITS),
    reading: StateReading | None = None,  # of the targets' hidden states, if the drafters' method reads them
    trust: TrustConfig | None = None,
    grammars: GrammarCompiler | None = None,  # over the vocabulary
    sessions: int = SESSIONS,  # that each target and each drafter serves at once
    tracer: Callable[[str], SessionTracer] = lambda _: NoTracing(),  # of a service, by its name
    examples: Callable[[Example], None] | None = None,  # takes sessions that drafts may learn from
) -> AsyncIterator[Cluster]:
    """Starts everything, and afterwards checks that nothing was left behind before stopping it."""
    tasks: list[asyncio.Task[None]] = []
    replicas: dict[str, TargetReplica] = {}
    drafting: dict[str, Drafter] = {}
    servers: dict[str, GrpcServer] = {}
    engines: list[ThreadEngine] = []
    pace = Pace()
    layout = None if reading is None else LAYOUT
    trust = trust or TrustConfig()
    for index in range(targets):
        runner = target_runner(index) if reading is None else reading.runner(pages)
        engines.append(ThreadEngine(StepExecutor(runner, VOCABULARY, grammars=grammars)))
        limits = VerificationLimits(
            VOCABULARY, CONTEXT, sessions, max_step_tokens=4 * sessions, pages=pages, page_size=PAGE_SIZE, states=layout
        )
        engine = wrap_engine(PacedEngine(engines[-1], pace))
        pacing = ReferenceLoop() if lock_step else Adaptive()
        replica = TargetReplica(
            engine, limits, IDENTITY.vocabulary, IDENTITY.target_model, 30, pacing, tracer=tracer("target")
        )
        server = await serve_target(replica, "127.0.0.1", trust=trust)
        replicas[server.address] = replica
        servers[server.address] = server
        tasks.append(asyncio.create_task(replica.run()))
    for _ in range(drafters):
        drafter = Drafter(
            a_draft_model(draft_logits, grammars) if reading is None else reading.method(),
            DrafterLimits(VOCABULARY, CONTEXT, sessions, layout, NO_BOUNDS if reading is None else reading.bounds),
            IDENTITY.vocabulary,
            IDENTITY.target_model,
            draft_ahead=not lock_step,
            access=TargetAccess(credentials=credentials_of(trust, PeerRole.DRAFTER)),
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
