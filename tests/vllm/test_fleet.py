"""A fleet of one vLLM target and one of the project's own, with a drafter, over real gRPC in one process.

Whichever is lost in mid-stream, the other goes on with the same text.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.drafter import Drafter
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.forwards import reduce_head
from actors.drafters.model.sampling import DraftingLimits
from actors.engine.executor import Engine, StepExecutor, ThreadEngine
from actors.engine.runner import ModelRunner
from actors.grammars import GrammarCompiler, load_grammar_vocabulary
from actors.servers import GrpcServer, serve_drafter, serve_target
from actors.target import TargetReplica
from actors.vllm_engine.engine import VllmEngine
from cluster.audit import Audits
from cluster.config import AuditConfig
from cluster.drafting.session_table import DrafterLimits
from cluster.page_allocator import SessionMemory
from cluster.routing.ledger import CommittedTokens, Generation
from cluster.routing.membership import Endpoint, Members
from cluster.speculation.controller import ReferenceLoop
from cluster.verification.scheduler import VerificationLimits
from protos.messages import Acceptance
from serve_app.router import Identity, Router, RouterLimits
from tests.static_membership import StaticMembership
from tests.vllm.cases import asked, config
from tests.vllm.scripted import CONTEXT, LONGEST, VOCABULARY, ScriptedTarget, Scripts

IDENTITY = Identity("tiny-vocabulary", "tiny-target")
PAGE_SIZE = 16
PAGES = 256
NEW_TOKENS = 48
ROUNDS = 10  # until both targets were drafted for: texts may be over before the drafter has read them
KINDS = ("greedy", "plain", "penalised", "greedy_penalised", "biased", "grammar", "no_early_end")
PROMPTS = {f"{kind}-{index}": [11 + index, 7, 50, 3 * index + 1] for index, kind in enumerate(KINDS)}


def own_runner(folder: Path) -> ModelRunner:
    return ModelRunner(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), PAGES, PAGE_SIZE)


def own_executor(folder: Path) -> StepExecutor:
    grammars = GrammarCompiler(load_grammar_vocabulary(folder))
    return StepExecutor(own_runner(folder), VOCABULARY, grammars=grammars)


def limits(pages: int, page_size: int, own_draws_only: bool) -> VerificationLimits:
    return VerificationLimits(
        VOCABULARY, CONTEXT, 8, 64, pages, page_size, trees=not own_draws_only, own_draws_only=own_draws_only
    )


@pytest.fixture(scope="module")
def vllm_engine(tiny_llama: Path) -> Iterator[VllmEngine]:
    async def start() -> VllmEngine:
        return await VllmEngine.start(config(tiny_llama), str(tiny_llama), VOCABULARY)

    engine = asyncio.run(start())
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def texts(tiny_llama: Path) -> dict[str, list[int]]:
    """Returns the texts of the project's own engine without speculation."""
    own = ScriptedTarget(own_executor(tiny_llama).step, limits(PAGES, PAGE_SIZE, False))
    for session, prompt in PROMPTS.items():
        own.open(asked(session, prompt, NEW_TOKENS))
    own.run(Scripts({}).none)
    return {session: life.text for session, life in own.lives.items()}


@dataclass
class Fleet:
    router: Router
    replicas: dict[str, TargetReplica]  # by kind of engine
    servers: dict[str, GrpcServer]

    async def text(self, session: str) -> list[int]:
        opened = asked(session, PROMPTS[session], NEW_TOKENS)
        generation = Generation(
            session=session,
            prompt=opened.tokens,
            max_len=opened.max_len,
            stop_ids=opened.stop_ids,
            sampling=opened.sampling,
            seed=opened.seed,
            draft_seed=1,
            choice=0,
            hash_key=3,
            acceptance=Acceptance.COUPLED,
            draft_tokens=LONGEST,
            grammar=opened.grammar,
            rules=opened.rules,
        )
        tokens: list[int] = []
        async for event in self.router.generate(generation):
            if isinstance(event, CommittedTokens):
                tokens += event.tokens
        return tokens


@asynccontextmanager
async def fleet(folder: Path, vllm_engine: VllmEngine) -> AsyncIterator[Fleet]:
    own = ThreadEngine(own_executor(folder))
    memory = vllm_engine.memory
    kinds: dict[str, tuple[Engine, VerificationLimits, SessionMemory | None]] = {
        "own": (own, limits(PAGES, PAGE_SIZE, False), None),
        "vllm": (vllm_engine, limits(memory.pages, memory.page_size, True), memory),
    }
    replicas = {}
    servers = {}
    for kind, (engine, bounds, pages) in kinds.items():
        replicas[kind] = TargetReplica(
            engine, bounds, IDENTITY.vocabulary, IDENTITY.target_model, 300, ReferenceLoop(), memory=pages
        )
        servers[kind] = await serve_target(replicas[kind], "127.0.0.1")
    cache = DraftCache(PAGES, PAGE_SIZE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(VOCABULARY)
    reduce_head(model, tokens)
    grammars = GrammarCompiler(load_grammar_vocabulary(folder))
    runner = ModelRunner(model, PAGES, PAGE_SIZE)
    method = DraftModel(runner, tokens, cache, DraftingLimits(top_k=8), makers=(grammars.draft_masking,))
    drafter = Drafter(method, DrafterLimits(VOCABULARY, CONTEXT, 16), IDENTITY.vocabulary, IDENTITY.target_model)
    servers["drafter"] = await serve_drafter(drafter, "127.0.0.1")
    members = Members(
        tuple([Endpoint(servers[kind].address, servers[kind].address) for kind in kinds]),
        (Endpoint(servers["drafter"].address, servers["drafter"].address),),
    )
    audits = Audits(AuditConfig(), "float32", lambda difference: None)
    router = Router(StaticMembership(members), IDENTITY, RouterLimits(100, 60), audits)
    tasks = [asyncio.create_task(part.run()) for part in (*replicas.values(), drafter, router)]
    try:
        async with asyncio.timeout(60):
            while len(router.reachable) < 3:
                await asyncio.sleep(0.05)
        yield Fleet(router, replicas, servers)
        async with asyncio.timeout(60):
            while not (all(replica.is_idle for replica in replicas.values()) and vllm_engine._core.is_idle):
                await asyncio.sleep(0.01)  # the vLLM engine is the next fleet's too
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await router.close()
        await drafter.close()
        for server in servers.values():
            await server.stop(0)
        await own.close()
        for failure in ended:
            if isinstance(failure, Exception):  # and not that it was cancelled
                raise failure


async def test_both_kinds_serve_the_same_texts_with_drafts(
    tiny_llama: Path, vllm_engine: VllmEngine, texts: dict[str, list[int]]
) -> None:
    async with fleet(tiny_llama, vllm_engine) as whole:
        for _ in range(ROUNDS):
            found = await asyncio.gather(*[whole.text(session) for session in PROMPTS])
            assert dict(zip(PROMPTS, found, strict=True)) == texts
            if all(replica.scheduler.counts.accepted_tokens for replica in whole.replicas.values()):
                return
        raise AssertionError("one of the targets was never drafted for")


@pytest.mark.parametrize("leaving", ["vllm", "own"])
async def test_what_leaves_as_planned_hands_its_sessions_over(
    tiny_llama: Path, vllm_engine: VllmEngine, texts: dict[str, list[int]], leaving: str
) -> None:
    async with fleet(tiny_llama, vllm_engine) as whole:
        running = [asyncio.create_task(whole.text(session)) for session in PROMPTS]
        replica = whole.replicas[leaving]
        async with asyncio.timeout(120):
            while not replica.committed_tokens:
                await asyncio.sleep(0.001)
            assert replica.scheduler.load()["sessions"], "nothing was left to be handed over"
            await replica.leave(within_s=60)
        found = await asyncio.gather(*running)
        assert dict(zip(PROMPTS, found, strict=True)) == texts
        assert whole.router.sessions.handovers[("target", "planned")] > 0


@pytest.mark.parametrize("lost", ["vllm", "own", "drafter"])
async def test_what_is_lost_in_mid_stream_changes_no_text(
    tiny_llama: Path, vllm_engine: VllmEngine, texts: dict[str, list[int]], lost: str
) -> None:
    async with fleet(tiny_llama, vllm_engine) as whole:
        running = [asyncio.create_task(whole.text(session)) for session in PROMPTS]
        watched = whole.replicas.get(lost, whole.replicas["vllm"])
        async with asyncio.timeout(120):
            while not (watched.scheduler.counts.accepted_tokens or watched.scheduler.controller.load.step.pace.count):
                await asyncio.sleep(0.001)
        await whole.servers[lost].stop(0)
        assert not all(task.done() for task in running), "nothing was left to be lost"
        async with asyncio.timeout(150):
            found = await asyncio.gather(*running)
        assert dict(zip(PROMPTS, found, strict=True)) == texts
