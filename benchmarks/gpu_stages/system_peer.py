"""Processes of stage F: the target with one replica per arm, and a drafter."""

import asyncio
import os
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop
from random_pair import DRAFT_PART, SIZES, add_noise, config_of, random_model, silence
from transformers import PreTrainedModel

from actors.attention.select_backend import attention_shape, choose_attention
from actors.drafter import Drafter, MethodFigures
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.sampling import DraftingLimits
from actors.drafters.pass_profile import profile_drafting
from actors.engine.executor import StepExecutor, ThreadEngine
from actors.engine.runner import ModelRunner, profile_steps
from actors.engine.static_step import Buckets, Recording
from actors.models.decoder import decoder_for
from actors.servers import serve_drafter, serve_target
from actors.target import TargetReplica
from cluster.drafting.session_table import DrafterLimits
from cluster.speculation.controller import Adaptive, LockStep
from cluster.telemetry import Actor, Timeline
from cluster.verification.scheduler import VerificationLimits
from gpu_stages.steps import CAPTURED, EAGER, PAGE_SIZE, capturable, capture_on
from protos.messages import Identity

ARMS = ("plain", "speculative", "useless draft")
IDENTITY = ("random-vocabulary", "random-target")
STEP_TOKENS = 2048
BRANCHES = 8  # rows per session while drafting ahead
STEP_TIMEOUT_S = 60.0
TRACED_EVENTS = 1 << 16


@dataclass(frozen=True)
class PairSizes:
    """The pair and its load."""

    size: str  # of random_pair
    vocabulary: int
    agreement: float
    prompt: int
    tokens: int  # of an answer
    sessions: tuple[int, ...]
    draft_tokens: int
    rounds: int
    is_lock_step: bool = False  # every step waits for its blocks, so a short test verifies some

    @property
    def context(self) -> int:
        return self.prompt + self.tokens + self.draft_tokens + PAGE_SIZE

    @property
    def pages_each(self) -> int:
        return -(-self.context // PAGE_SIZE)


@dataclass(frozen=True)
class PairFacts:
    """Attention and mode of a process's forwards."""

    attention: str
    mode: str  # captured where the attention supports it


@dataclass(frozen=True)
class TraceRequest:
    """A request for the events of a replica or drafter since a wall-clock time."""

    name: str
    since_s: float


class Serving:
    """Runners of one process, captured where possible."""

    def __init__(self, model: PreTrainedModel, sizes: PairSizes, device: torch.device) -> None:
        self._model = model.eval()
        self._sizes = sizes
        self._device = device
        self._attention, _ = choose_attention(attention_shape(model, PAGE_SIZE), device, sizes.context)
        self._padded = capturable(self._attention, device)
        self._decoder = decoder_for(self._model, context=sizes.context)
        self.takes_trees = self._attention.takes_trees
        used = self._attention if self._padded is None else self._padded
        self.facts = PairFacts(used.name, EAGER if self._padded is None else CAPTURED)

    def runner(self, pages: int, sessions: int, vocabulary: int | None) -> ModelRunner:
        """Returns a runner that captures the steps of this number of sessions, if possible."""
        is_captured = self._padded is not None
        draws = vocabulary is not None
        buckets = Buckets.for_sessions(sessions, self._sizes.context, PAGE_SIZE, self._attention, draws=draws)
        runner = ModelRunner(
            self._model,
            pages,
            PAGE_SIZE,
            self._padded if is_captured else self._attention,
            self._decoder,
            is_checked=True,
            context=self._sizes.context,
            vocabulary=vocabulary,
            recording=Recording(buckets, capture_on(self._device)) if is_captured else None,
        )
        runner.capture_steps()
        if not runner.is_captured:
            self.facts = replace(self.facts, mode=EAGER)
        return runner


def run_target(connection: Connection, sizes: PairSizes, device: str) -> None:
    """Serves one replica per arm until None is received; sends agreement, facts and addresses by arm."""
    _run(connection, partial(_serve_target, sizes, torch.device(device)))


def run_drafter(connection: Connection, sizes: PairSizes, device: str, arm: str) -> None:
    """Serves a drafter until None is received; sends its facts and its address."""
    _run(connection, partial(_serve_drafter, sizes, torch.device(device), arm))


async def _serve_target(sizes: PairSizes, device: torch.device, connection: Connection) -> None:
    layers = SIZES[sizes.size]["num_hidden_layers"]
    model = random_model(config_of(sizes.size, sizes.vocabulary, layers), device)
    found = add_noise(model, sizes.agreement)
    serving = Serving(model, sizes, device)
    sessions = max(sizes.sessions)
    pages = 2 * sessions * sizes.pages_each
    limits = VerificationLimits(
        sizes.vocabulary,
        sizes.context,
        sessions,
        STEP_TOKENS,
        pages=pages,
        page_size=PAGE_SIZE,
        trees=serving.takes_trees,
    )
    replicas = {}
    servers = {}
    for arm in ARMS:
        runner = serving.runner(pages, sessions, sizes.vocabulary)
        cost = profile_steps(runner, PAGE_SIZE, pages, sessions)
        engine = ThreadEngine(StepExecutor(runner, sizes.vocabulary))
        pacing = LockStep() if sizes.is_lock_step else Adaptive()
        replicas[arm] = TargetReplica(engine, limits, *IDENTITY, STEP_TIMEOUT_S, pacing, cost)
        replicas[arm].timeline = Timeline(replicas[arm].timeline.now, TRACED_EVENTS)
        servers[arm] = await serve_target(replicas[arm], "127.0.0.1")
    facts = serving.facts
    del model, serving  # frees weights that the decoder has merged
    connection.send((found, facts, {arm: server.address for arm, server in servers.items()}))
    timelines = {arm: replica.timeline for arm, replica in replicas.items()}
    await _until_stopped(connection, "target", timelines, [replica.run() for replica in replicas.values()])


async def _serve_drafter(sizes: PairSizes, device: torch.device, arm: str, connection: Connection) -> None:
    layers = max(1, SIZES[sizes.size]["num_hidden_layers"] // DRAFT_PART)
    model = random_model(config_of(sizes.size, sizes.vocabulary, layers), device)
    silence(model)
    if arm == ARMS[-1]:
        spoil(model)
    serving = Serving(model, sizes, device)
    sessions = max(sizes.sessions)
    pages = 2 * BRANCHES * sessions * sizes.pages_each
    runner = serving.runner(pages, BRANCHES * sessions, None)
    token_ids = torch.arange(sizes.vocabulary, device=device)
    limits = DraftingLimits(top_k=64, max_positions=sizes.context)
    method = DraftModel(runner, token_ids, DraftCache(pages, PAGE_SIZE), limits)
    method.capture_chains(sizes.draft_tokens, BRANCHES * sessions)
    bounds = DrafterLimits(sizes.vocabulary, sizes.context, 2 * sessions)
    figures = MethodFigures(cost=profile_drafting(method, bounds))
    drafter = Drafter(method, bounds, {"": Identity(*IDENTITY)}, figures=figures)
    drafter.timeline = Timeline(drafter.timeline.now, TRACED_EVENTS)
    server = await serve_drafter(drafter, "127.0.0.1")
    connection.send((serving.facts, server.address))
    await _until_stopped(connection, "drafter", {arm: drafter.timeline}, [drafter.run()])


@torch.inference_mode()
def spoil(model: PreTrainedModel) -> None:
    """Shifts the rows of the LM head, so that the model never follows the pair's cycle."""
    head = model.get_output_embeddings().weight
    head.copy_(head.roll(1, 0))


def _run(connection: Connection, serve: Callable[[Connection], Any]) -> None:
    uvloop.install()  # as Ray does in its workers
    asyncio.run(_ended_by_errors(serve(connection)))
    os._exit(0)  # open streams would delay a regular exit


async def _ended_by_errors(serving: Coroutine[Any, Any, None]) -> None:
    """Ends the process if serving fails; a regular exit would wait for the thread that reads from the connection."""
    try:
        await serving
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)


async def _until_stopped(
    connection: Connection, role: str, timelines: Mapping[str, Timeline], loops: list[Any]
) -> None:
    """Runs the loops and answers requests for events until None is received. Raises what a loop raises."""
    running = [asyncio.create_task(loop) for loop in loops]
    answering = asyncio.create_task(_answer(connection, role, timelines))
    done, _ = await asyncio.wait((*running, answering), return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _answer(connection: Connection, role: str, timelines: Mapping[str, Timeline]) -> None:
    while True:
        request: TraceRequest | None = await asyncio.to_thread(connection.recv)
        if request is None:
            return
        recording = timelines[request.name].recording()
        since_s = request.since_s - recording.wall_offset_s
        events = tuple(event for event in recording.events if event.at_s >= since_s)
        connection.send(Actor(role, request.name, replace(recording, events=events)))
