"""SmolLM2 by a vLLM target, from HTTP through router, target and drafter: greedy text is what `generate` says."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from openai import AsyncOpenAI

from actors.drafter import Drafter
from actors.drafters.registry import DraftSetup, create_method
from actors.models.checkpoint import local_folder, vocabulary
from actors.servers import serve_drafter, serve_target
from actors.target import TargetReplica
from cluster.audit import Audits
from cluster.config import AuditConfig, SlipstreamConfig
from cluster.drafting.session_table import DrafterLimits
from cluster.routing.membership import Endpoint, Members
from cluster.speculation.controller import ReferenceLoop
from serve_app.api.metrics import Metrics
from serve_app.api.replies import HealthReport
from serve_app.api.routes import create_api
from serve_app.api.text import TextCodec
from serve_app.cli.demo import demo_config
from serve_app.demo_data import BENCH_PROMPTS
from serve_app.router import Identity, Router, RouterLimits
from serve_app.startup import start_engine
from tests.integration.serving import EXACT, Reference
from tests.static_membership import StaticMembership

PROMPTS = 20
NEW_TOKENS = 24
IDENTITY = Identity("vocabulary", "target")
VLLM = (
    "target.engine=vllm",
    "target.vllm={enforce_eager: true}",
    "target.cache_per_rank.gib=0.5",
    "draft.resources.background=false",
)


@pytest.fixture
def config() -> SlipstreamConfig:
    found = demo_config([*EXACT, *VLLM])
    if not Path(found.model.target).is_dir():
        pytest.skip("the demo's target model is not there; run `make models`")
    return found


async def healthy() -> HealthReport:
    return HealthReport(status="ok", audit="ok")


@asynccontextmanager
async def served(config: SlipstreamConfig) -> AsyncIterator[tuple[AsyncOpenAI, TargetReplica]]:
    folder = local_folder(config.model.target)
    tokens = vocabulary(folder)
    started = await start_engine(config, folder, tokens, config.target.engine)
    replica = TargetReplica(
        started.engine,
        started.limits,
        IDENTITY.vocabulary,
        IDENTITY.target_model,
        300,
        ReferenceLoop(),
        memory=started.memory,
    )
    setup = DraftSetup(
        dtype=config.model.dtype,
        max_context=config.model.max_context,
        draft_tokens=config.speculation.draft_tokens,
        target_tokens=tokens,
        target=config.model.target,
        states=None,
    )
    bounds = DrafterLimits(max(tokens) + 1, config.model.max_context, config.draft.max_sessions)
    drafter = Drafter(create_method(config.draft, setup), bounds, IDENTITY.vocabulary, IDENTITY.target_model)
    servers = [await serve_target(replica, "127.0.0.1"), await serve_drafter(drafter, "127.0.0.1")]
    target, draft = [Endpoint(server.address, server.address) for server in servers]
    audits = Audits(AuditConfig(), config.model.dtype, lambda difference: None)
    router = Router(StaticMembership(Members((target,), (draft,))), IDENTITY, RouterLimits(100, 60), audits)
    api = create_api(router, TextCodec.load(str(folder)), config, Metrics(remedies=dict), healthy)
    http = uvicorn.Server(uvicorn.Config(api, host="127.0.0.1", port=0, log_level="warning"))
    tasks = [asyncio.create_task(work) for work in (replica.run(), drafter.run(), router.run(), http.serve())]
    try:
        async with asyncio.timeout(60):
            while not (http.started and len(router.reachable) == len(servers)):
                await asyncio.sleep(0.05)
        port = http.servers[0].sockets[0].getsockname()[1]
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600) as client:
            yield client, replica
    finally:
        http.should_exit = True
        await tasks.pop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await router.close()
        await drafter.close()
        for server in servers:
            await server.stop(0)
        await started.engine.close()


async def ask(client: AsyncOpenAI, prompt: str, **options: object) -> str:
    answer = await client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=NEW_TOKENS,
        **{"temperature": 0, **options},
    )
    return str(answer.choices[0].message.content)


async def test_greedy_text_over_http_equals_generate_and_seeds_fix_the_rest(config: SlipstreamConfig) -> None:
    prompts = [json.loads(line)["prompt"] for line in BENCH_PROMPTS.read_text().splitlines()][:PROMPTS]
    async with served(config) as (client, replica):
        texts = [text for at in range(0, PROMPTS, 4) for text in await _ask_all(client, prompts[at : at + 4])]
        drawn = [
            await ask(
                client, prompts[0], temperature=0.8, seed=5, extra_body={"speculation": {"draft_tokens": longest}}
            )
            for longest in (0, 5)
        ]
        assert replica.scheduler.counts.accepted_tokens > 0
    reference = Reference(config.model.target)
    for prompt, text in zip(prompts, texts, strict=True):
        reference.assert_greedy(prompt, NEW_TOKENS, text)
    assert drawn[0] == drawn[1]


async def _ask_all(client: AsyncOpenAI, prompts: list[str]) -> list[str]:
    return list(await asyncio.gather(*[ask(client, prompt) for prompt in prompts]))
