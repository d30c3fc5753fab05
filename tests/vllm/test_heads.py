"""A head that reads a vLLM target's states is as accurate as with any target, and changes no text.

Only vLLM's second model runner exposes states: `TRITON_INTERPRET=1 pytest tests/vllm/test_heads.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.drafter import Drafter
from actors.drafters.registry import DraftSetup, capture_spec, create_method, state_bounds, states_format
from actors.engine.executor import ThreadEngine
from actors.models.checkpoint import vocabulary
from actors.servers import serve_drafter, serve_target
from actors.target import TargetReplica
from cluster.audit import Audits
from cluster.config import AuditConfig, SlipstreamConfig
from cluster.drafting.method import DraftingMethod
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.reference_loop import lock_step
from cluster.routing.ledger import CommittedTokens, Generation, Session
from cluster.routing.membership import Endpoint, Members
from cluster.speculation.controller import LockStep
from cluster.verification.scheduler import VerificationScheduler
from cluster.verification.step import Outcome, StepPlan
from protos.messages import Acceptance, Identity, Sampling
from serve_app.router import Router, RouterLimits
from tests.session_events import events_of
from tests.static_membership import StaticMembership
from tests.vllm.cases import config, limits, on_own_engine
from tests.vllm.right_head import Text, right_head
from tests.vllm.scripted import CONTEXT, VOCABULARY, Scripts, request
from tests.vllm.second_runner import IS_ASKED_FOR

IDENTITY = Identity("tiny-vocabulary", "tiny-target")
READ = (0, 1)  # embeddings and output of the first layer
HIDDEN = 64
NEW_TOKENS = 24
LONG = [int(token) for token in torch.randint(3, 250, (150,), generator=torch.Generator().manual_seed(3))]
PROMPTS = {"short-0": [7, 50, 3, 91, 12], "short-1": [200, 9, 9, 31], "long": LONG, "long-again": LONG}


@pytest.fixture(scope="module")
def texts(tiny_llama: Path) -> dict[str, Text]:
    """Returns greedy texts of Slipstream's own engine without drafts."""
    own = on_own_engine(tiny_llama)
    for name, prompt in PROMPTS.items():
        own.open(request(name, Sampling(temperature=0.0), prompt, NEW_TOKENS))
    own.run(Scripts({}).none)
    return {name: Text(life.prefix.tokens, len(PROMPTS[name])) for name, life in own.lives.items()}


@pytest.fixture(scope="module")
def asked(tiny_llama: Path, texts: dict[str, Text], tmp_path_factory: pytest.TempPathFactory) -> SlipstreamConfig:
    known = [texts[name] for name in ("short-0", "short-1", "long")]
    head = right_head(tiny_llama, known, READ, tmp_path_factory.mktemp("heads") / "eagle3")
    return config(tiny_llama, draft={"method": "eagle", "model": str(head)})


@pytest.fixture(scope="module")
def core(tiny_llama: Path, asked: SlipstreamConfig) -> Iterator[object]:
    if not IS_ASKED_FOR:
        pytest.skip("the second runner is not asked for")
    from actors.vllm_engine.core import start_core

    capture = capture_spec(asked.draft, tiny_llama, "float32")
    started = start_core(asked, str(tiny_llama), VOCABULARY, capture=capture)
    yield started
    started.close()


def method_of(asked: SlipstreamConfig, folder: Path) -> tuple[DraftingMethod, DrafterLimits]:
    """Creates the drafting method like a drafter."""
    layout = states_format(asked.draft, folder)
    setup = DraftSetup("float32", CONTEXT, asked.speculation.draft_tokens, vocabulary(folder), str(folder), layout)
    bounds = DrafterLimits(VOCABULARY, CONTEXT, 8, layout, state_bounds(asked.draft, folder))
    return create_method(asked.draft, setup), bounds


def generation(name: str, text: Text) -> Generation:
    """Returns a generation with one draft token per round, the head's maximum."""
    return Generation(
        session=name,
        prompt=tuple(text.tokens[: text.prompt_len]),
        max_len=len(text.tokens),
        stop_ids=(),
        sampling=Sampling(temperature=0.0),
        seed=1,
        draft_seed=1,
        choice=0,
        hash_key=3,
        acceptance=Acceptance.COUPLED,
        draft_tokens=1,
    )


@pytest.mark.parametrize("name", ["short-0", "short-1"])
def test_in_lock_step_every_draft_of_a_right_head_is_accepted(
    core: object, asked: SlipstreamConfig, tiny_llama: Path, texts: dict[str, Text], name: str
) -> None:
    method, bounds = method_of(asked, tiny_llama)
    assert bounds.states.width == HIDDEN, "the target projects"
    target = VerificationScheduler(
        limits(core.memory.pages, core.memory.page_size, bounds.states), LockStep(), memory=core.memory
    )
    drafter = DraftScheduler(bounds, draft_ahead=False)
    text = texts[name]
    emits = list(lock_step(Session(generation(name, text)), drafter, method, target, core))
    assert [token for emit in emits for token in emit.tokens] == text.tokens[text.prompt_len :]
    # The first round has no states yet; after it, every block's single token is right.
    assert (target.counts.accepted_tokens, target.counts.wasted_tokens) == ((NEW_TOKENS - 1) // 2, 0)
    last = target.plan(1e9)
    assert last is not None
    core.step(last)
    assert core.is_idle


class Watched:
    """Core that counts wrong draft tokens."""

    def __init__(self, core: Any) -> None:
        self.rejected = 0
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def step(self, plan: StepPlan) -> list[Outcome]:
        outcomes: list[Outcome] = self._core.step(plan)
        fed = {row.session: self._core.memory.fed(row) for row in plan.rows}
        self.rejected += sum(fed[outcome.session].drafted - outcome.accepted for outcome in outcomes)
        return outcomes


@asynccontextmanager
async def pair(
    core: Watched, asked: SlipstreamConfig, folder: Path
) -> AsyncIterator[tuple[Router, TargetReplica, Drafter]]:
    """Runs a target and a drafter over real gRPC in lock step."""
    method, bounds = method_of(asked, folder)
    taken = limits(core.memory.pages, core.memory.page_size, bounds.states)
    engine = ThreadEngine(core)
    names = (IDENTITY.vocabulary, IDENTITY.target_model)
    replica = TargetReplica(engine, taken, *names, 300, LockStep(), memory=core.memory)
    drafter = Drafter(method, bounds, {"": IDENTITY}, draft_ahead=False)
    servers = [await serve_target(replica, "127.0.0.1"), await serve_drafter(drafter, "127.0.0.1")]
    target, draft = [Endpoint(server.address, server.address) for server in servers]
    audits = Audits(AuditConfig(), "float32", lambda difference: None)
    router = Router(StaticMembership(Members((target,), (draft,))), IDENTITY, RouterLimits(100, 60), audits)
    tasks = [asyncio.create_task(part.run()) for part in (replica, drafter, router)]
    try:
        async with asyncio.timeout(60):
            while len(router.reachable) < len(servers):
                await asyncio.sleep(0.05)
        yield router, replica, drafter
        async with asyncio.timeout(60):
            while not (replica.is_idle and drafter.is_idle):
                await asyncio.sleep(0.01)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await router.close()
        await drafter.close()
        for server in servers:
            await server.stop(0)
        await engine.close()


async def extra_results(router: Router, name: str, text: Text) -> list[int]:
    tokens: list[int] = []
    async for event in events_of(router, generation(name, text)):
        if isinstance(event, CommittedTokens):
            tokens += event.tokens
    return tokens


async def test_prompt_and_decode_states_use_separate_streams(
    core: object, asked: SlipstreamConfig, tiny_llama: Path, texts: dict[str, Text]
) -> None:
    """The sessions are a chunked prompt, a prompt in vLLM's cache, and two other texts."""
    watched = Watched(core)
    async with pair(watched, asked, tiny_llama) as (router, replica, drafter):
        found = {"long": await extra_results(router, "long", texts["long"])}
        others = [name for name in texts if name != "long"]
        answers = await asyncio.gather(*[extra_results(router, name, texts[name]) for name in others])
        found |= dict(zip(others, answers, strict=True))
        assert found == {name: text.tokens[text.prompt_len :] for name, text in texts.items()}
        scheduler = replica.scheduler
        # Counts only verified blocks: a block that arrives late or after the end does not depend on states.
        assert watched.rejected == 0, "a draft was wrong, so a state was"
        assert scheduler.counts.accepted_tokens > len(texts) * NEW_TOKENS / 3
        assert scheduler.feeds.rows["apart"] > 0
        assert scheduler.feeds.rows["verdict"] > 0
        assert drafter.scheduler.counts["states"] >= sum(len(text.tokens) - 3 for text in texts.values())
