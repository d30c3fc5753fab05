"""Slipstream as a benchmark arm: router and target in the arm's process, the drafter in a child, connected by gRPC.

Uses neither HTTP nor Ray, because the other arms have neither.
"""

import asyncio
import multiprocessing as mp
import time
from collections.abc import Mapping
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from arms import Prompts, Run, Setup

from actors.drafter import Drafter, DraftingThread, MethodFigures
from actors.drafters.pass_profile import profile_drafting
from actors.drafters.registry import DraftSetup, create_method
from actors.engine.executor import StepExecutor, ThreadEngine
from actors.engine.process import compute_in_background, use_cpu
from actors.engine.runner import ModelRunner, profile_steps
from actors.models.checkpoint import load_model, vocabulary
from actors.servers import serve_drafter, serve_target
from actors.target import TargetReplica
from cluster.audit import Audits
from cluster.config import AuditConfig, SlipstreamConfig, validated
from cluster.costs import ForwardCost
from cluster.drafting.session_table import DrafterLimits
from cluster.routing.ledger import CommittedTokens, Generation
from cluster.routing.membership import Endpoint, Members
from cluster.speculation.controller import Adaptive
from cluster.verification.scheduler import VerificationLimits
from protos.messages import Acceptance, Identity, Sampling
from serve_app.router import Router, RouterLimits
from serve_app.startup import start_engine
from tests.session_events import events_of
from tests.static_membership import StaticMembership

IDENTITY = Identity("vocabulary", "target")
PAGE_SIZE = 16


def fleet_config(setup: Setup, engine: str) -> SlipstreamConfig:
    """Returns the demo's settings with the given engine and the draft length from `setup.speculative`."""
    options = dict(setup.speculative or {})
    resources = {"threads": setup.threads}
    target: dict[str, Any] = {"engine": engine, "max_sessions": setup.sessions, "resources_per_rank": resources}
    if engine == "vllm":
        target |= {"vllm": options.pop("vllm", {}), "cache_per_rank": {"gib": 1}}
    return validated(
        {
            "model": {"target": str(setup.folder), "dtype": setup.dtype, "max_context": setup.context},
            "target": target,
            "draft": {
                "model": str(setup.draft),
                "draft_model": {"quantization": "int8", "min_confidence": 0.1},
                "resources": {**resources, "background": True},
                "max_sessions": setup.sessions,
            },
            "speculation": {"draft_tokens": options.get("num_speculative_tokens", 12)},
        }
    )


class FleetArm:
    """Decodes greedily in sessions through the router."""

    def __init__(self, setup: Setup, engine: str) -> None:
        self._config = fleet_config(setup, engine)
        self._names = count()
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())

    def decode(self, prompts: Prompts, new_tokens: int) -> Run:
        deadline = time.monotonic() + 60
        while len(self._router.reachable) < 2:  # its processes were suspended since the last call
            assert time.monotonic() < deadline, "target and drafter are not both reachable"
            self._loop.run_until_complete(asyncio.sleep(0.01))
        return self._loop.run_until_complete(self._decode(prompts, new_tokens))

    async def _start(self) -> None:
        config = self._config
        context = mp.get_context("spawn")
        pipe, child_end = context.Pipe()
        self._drafter = context.Process(target=_draft, args=(config, child_end), daemon=True)
        self._drafter.start()
        replica = await _target(config)
        self._server = target = await serve_target(replica, "127.0.0.1")  # keeps the server alive
        draft: str = await asyncio.to_thread(pipe.recv)
        members = Members((Endpoint(target.address, target.address),), (Endpoint(draft, draft),))
        audits = Audits(AuditConfig(), config.model.dtype, lambda difference: None)
        self._router = Router(StaticMembership(members), IDENTITY, RouterLimits(100, 60), audits)
        self._tasks = [asyncio.create_task(replica.run()), asyncio.create_task(self._router.run())]

    async def _decode(self, prompts: Prompts, new_tokens: int) -> Run:
        began = time.perf_counter()
        firsts = await asyncio.gather(*[self._session(prompt, new_tokens, began) for prompt in prompts])
        return Run(max(firsts), time.perf_counter() - began)

    async def _session(self, prompt: tuple[int, ...], new_tokens: int, began: float) -> float:
        generation = Generation(
            session=f"session-{next(self._names)}",
            prompt=prompt,
            max_len=len(prompt) + new_tokens,
            stop_ids=(),
            sampling=Sampling(temperature=0.0),
            seed=0,
            draft_seed=1,
            choice=0,
            hash_key=1,
            acceptance=Acceptance.COUPLED,
            draft_tokens=self._config.speculation.draft_tokens,
        )
        first_s = 0.0
        async for event in events_of(self._router, generation):
            if isinstance(event, CommittedTokens) and not first_s:
                first_s = time.perf_counter() - began
        return first_s


async def _target(config: SlipstreamConfig) -> TargetReplica:
    """Creates the target replica; Slipstream's own engine runs on one thread of this process instead of Ray ranks."""
    folder = Path(config.model.target)
    pacing = Adaptive()
    if config.target.engine == "vllm":
        started = await start_engine(config, folder, vocabulary(folder), config.target.engine)
        return _replica(started.engine, started.limits, pacing, started.engine.step_cost, memory=started.memory)
    import torch

    use_cpu(config.target.resources_per_rank)
    pages = config.target.max_sessions * config.model.max_context // PAGE_SIZE
    runner = ModelRunner(load_model(folder, config.model.dtype, torch.device("cpu")), pages, PAGE_SIZE)
    cost = profile_steps(runner, PAGE_SIZE, pages, config.target.max_sessions)
    size = max(vocabulary(folder)) + 1
    limits = VerificationLimits(
        size, config.model.max_context, config.target.max_sessions, config.target.max_step_tokens, pages, PAGE_SIZE
    )
    return _replica(ThreadEngine(StepExecutor(runner, size)), limits, pacing, cost)


def _replica(
    engine: Any, limits: VerificationLimits, pacing: Adaptive, cost: ForwardCost, **memory: Any
) -> TargetReplica:
    return TargetReplica(engine, limits, IDENTITY.vocabulary, IDENTITY.target_model, 300, pacing, cost, **memory)


def _draft(config: SlipstreamConfig, pipe: Connection) -> None:
    asyncio.run(_serve_drafts(config, pipe))


async def _serve_drafts(config: SlipstreamConfig, pipe: Connection) -> None:
    use_cpu(config.draft.resources)
    tokens: Mapping[int, str] = vocabulary(Path(config.model.target))
    setup = DraftSetup(
        dtype=config.model.dtype,
        max_context=config.model.max_context,
        draft_tokens=config.speculation.draft_tokens,
        target_tokens=tokens,
        target=config.model.target,
        states=None,
    )
    method = create_method(config.draft, setup)
    limits = DrafterLimits(max(tokens) + 1, config.model.max_context, config.draft.max_sessions)
    profile = profile_drafting(method, limits)
    drafter = Drafter(
        method,
        limits,
        {"": IDENTITY},
        thread=DraftingThread(prepare=compute_in_background),
        figures=MethodFigures(cost=profile),
    )
    server = await serve_drafter(drafter, "127.0.0.1")
    pipe.send(server.address)
    await drafter.run()
