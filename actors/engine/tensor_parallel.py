"""Tensor-parallel ranks, each a Ray actor, in one torch.distributed group; to the coordinator, they are one engine.

All ranks run on one node. Messages travel through shared memory (`step_link`), since a Ray call takes milliseconds on a
machine with few cores. Rank 0 receives step plans from the coordinator and sends rows and draws to its followers. Every
rank makes the same forward and draws from its part of the vocabulary; rank 0 reads the result. Ray starts the ranks and
reports their death. If a rank dies, the others may wait forever in a collective, so the engine fails and the whole
replica is replaced.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn, TypeVar

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import PreTrainedModel

from actors.attention import AttentionBackend, PaddedBackend
from actors.attention.invariant import invariant_backend
from actors.attention.sdpa_gather import SdpaGather
from actors.attention.select_backend import (
    AttentionReport,
    AttentionShape,
    attention_shape,
    choose_attention,
    create_backend,
)
from actors.compute.collectives import Group, SingleRank, join
from actors.compute.hidden_states import CaptureSpec, StateCapture, StateProjection
from actors.compute.kv_cache import InputRow
from actors.compute.linear import GPU_TILE, InvariantProducts, processor_multiplies, projection
from actors.engine.executor import StepExecutor, within
from actors.engine.forward_codec import decode_forward, encode_forward
from actors.engine.huge_pages import use_huge_pages
from actors.engine.invariance import InvarianceCheck
from actors.engine.memory import Reserve, page_count, page_size_warning, state_bytes
from actors.engine.process import device_of, freeze_heap, use_cpu
from actors.engine.runner import ModelRunner, Runner, profile_steps
from actors.engine.static_step import Buckets, recording_on
from actors.engine.step_codec import StepDecoder, StepEncoder
from actors.engine.step_link import FollowersLink, LeaderLink, Listener, StepCaller, StepListener
from actors.grammars import grammars_of, load_grammar_vocabulary
from actors.models.checkpoint import load
from actors.models.decoder import ForwardOutput, decoder_for
from actors.models.fused import compile_invariant
from actors.models.recurrent_layers import recurrent_page_bytes
from actors.models.reference_check import check_model
from actors.models.weights import LoadReport
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.config import CacheConfig, Resources
from cluster.costs import ForwardCost
from cluster.errors import EngineError, ModelError
from cluster.page_allocator import PageCopy, SlotMove
from cluster.placement import actor_options
from cluster.verification.step import Outcome, StateRead, StepPlan

Done = TypeVar("Done")
Value = TypeVar("Value")


async def raise_when_any_ends(running: Sequence[Awaitable[Any]]) -> NoReturn:
    """Waits until any of these ends, which is always a failure, then raises EngineError."""
    tasks = [asyncio.ensure_future(reference) for reference in running]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except RayError as error:
        raise EngineError(f"a tensor-parallel rank failed: {error}") from error
    finally:
        for task in tasks:
            task.cancel()
    raise EngineError("a tensor-parallel rank has ended")


async def or_rank_failure(work: Awaitable[Done], running: Sequence[Awaitable[Any]]) -> Done:
    """Returns the result of `work`, which may block on a dead rank. Raises EngineError as soon as a rank ends."""
    if not running:
        return await work
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(raise_when_any_ends(running))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else watching.result()
    finally:
        working.cancel()
        watching.cancel()


log = logging.getLogger(__name__)

PREPARE_S = 60.0  # timeout for compiling one grammar; its router has already compiled it


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Parameters common to all ranks of a replica."""

    folder: str
    vocabulary: int  # exclusive upper bound of token ids; the embedding may have further padding rows
    dtype: str
    sessions: int  # maximum number of cached sessions
    context: int  # maximum tokens per session
    cache: CacheConfig
    resources: Resources
    ranks: int
    logit_rows: int  # maximum rows of logits per step
    capture: CaptureSpec | None = None  # hidden states to capture on the leader
    invariant: bool = False  # model.numerics

    @property
    def tile(self) -> int:
        """The number of tokens in a captured step is a multiple of this."""
        return GPU_TILE if self.invariant else 1


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's report after loading its model."""

    pid: int
    pages: int  # cache pages that fit in its memory
    load: LoadReport
    attention: AttentionReport
    numerics: str = "fast"  # guaranteed numerics; if the guarantee was withdrawn, with the reason


def from_leader(value: Value) -> Value:
    """Returns rank 0's value on every rank; other ranks' values have only the same type."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _check_equal(what: str, value: bool) -> None:
    """Raises ModelError unless `value` is equal on all ranks; otherwise, they would wait for each other forever."""
    values: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        ranks = [rank for rank, one in enumerate(values) if not one]
        raise ModelError(
            f"every tensor-parallel rank but {ranks} {what}; read their logs for the cause, or set"
            " target.resources_per_rank.cuda_graphs: false"
        )


class LeadingRunner:
    """Runner of rank 0; makes every follower run the same forward."""

    def __init__(self, runner: ModelRunner, followers: FollowersLink) -> None:
        self._runner = runner
        self._followers = followers
        self.vocabulary = runner.vocabulary

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        *,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        self._followers.send(encode_forward(rows, copies, moves, draws))
        return self._runner.forward(rows, copies, moves=moves, draws=draws)

    def read_states(self, slots: Sequence[int]) -> bytes:
        return self._runner.read_states(slots)


class Rank:
    """Ray actor that runs one rank."""

    def __init__(self, index: int, spec: RankSpec) -> None:
        use_cpu(spec.resources)
        self._index = index
        self._spec = spec
        self._captured = spec.capture if index == 0 else None
        self._project: StateProjection | None = None
        self._device = device_of(spec.resources)
        self._group: Group = SingleRank()
        self._followers: FollowersLink | None = None  # leader only: link to the followers
        self._leader: LeaderLink | None = None  # followers only: link to the leader
        self._model: PreTrainedModel | None = None
        self._attention: AttentionBackend | None = None
        self._executor: StepExecutor | None = None
        self._runner: ModelRunner | None = None  # runs only this rank's share
        self._leading: Runner | None = None  # runs the forward on all ranks
        self._pages = 0
        self._is_recurrent = False
        self._listener: StepListener | None = None
        self._grammar_listener: StepListener | None = None

    def free_address(self) -> str:
        """Returns an address with a free port on this rank's node, at which the group initializes."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def load(self, meeting_point: str) -> RankReport:
        """Joins the group, loads this rank's share, and reports the number of cache pages that fit."""
        spec = self._spec
        device = self._device
        if spec.ranks > 1:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=meeting_point, rank=self._index, world_size=spec.ranks)
            self._group = join(device, spec.invariant)
            if self._index == 0:
                listener = Listener()
                from_leader(listener.path)
                self._followers = FollowersLink(listener.accept(spec.ranks - 1))
            else:
                self._leader = LeaderLink(from_leader(""))
        if self._index == 0:
            check_model(Path(spec.folder), ranks=spec.ranks, max_context=spec.context)
        loaded = load(Path(spec.folder), spec.dtype, device, self._group)
        self._model = loaded.model
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        if self._index == 0 and device.type == "cpu" and not processor_multiplies(loaded.model.dtype):
            log.warning(
                "this processor does not multiply %s directly: verifying a block takes up to three times as long as in"
                " float32; set model.dtype to float32 if twice the memory is available",
                dtype,
            )
        if dtype != spec.dtype and self._captured and self._captured.load_projection:
            raise ModelError(
                f"{spec.folder} computes in {dtype}, so its hidden states cannot be projected in {spec.dtype}; set"
                f" model.dtype to {dtype}"
            )
        shape = attention_shape(self._model, spec.cache.page_size, spec.ranks)
        attention = self._create_attention(shape)  # may allocate memory, so before `page_count`
        self._project = self._captured.projection_on(device) if self._captured else None  # likewise
        page_bytes = shape.page_bytes + state_bytes(self._captured, spec.cache.page_size)
        recurrent_bytes = recurrent_page_bytes(self._model)
        self._is_recurrent = recurrent_bytes > 0
        if recurrent_bytes:
            attention = replace(attention, takes_trees=False)
            if warning := page_size_warning(spec.cache.page_size, shape.page_bytes, recurrent_bytes):
                log.warning("%s", warning)
        assert self._attention is not None, "it was just created"
        buckets = self._buckets(self._attention)
        columns = int(self._model.config.get_text_config().vocab_size)  # ranks gather the whole vocabulary
        pages = page_count(
            spec.cache,
            page_bytes + recurrent_bytes,
            spec.sessions,
            spec.context,
            device,
            spec.resources.gpu_share,
            Reserve.of_steps(
                max(spec.logit_rows, spec.tile, buckets.tokens[-1] if buckets else 0),
                columns,
                device,
                graphs=len(buckets.shapes) if buckets else 0,
            ),
            spec.ranks,
        )
        return RankReport(os.getpid(), pages, loaded.report, attention)

    def _buckets(self, attention: AttentionBackend) -> Buckets | None:
        """Returns the shapes of the steps to capture, or None if none are captured."""
        spec = self._spec
        if not (spec.resources.cuda_graphs and isinstance(attention, PaddedBackend)):
            return None
        return Buckets.for_sessions(
            spec.sessions, spec.context, spec.cache.page_size, attention, spec.tile, verified=spec.logit_rows
        )

    def _create_attention(self, shape: AttentionShape) -> AttentionReport:
        """Creates the attention backend that the leader chooses, since ranks must compute the same results."""
        if self._spec.invariant:
            self._attention, report = invariant_backend(shape, self._device)
            return report
        if self._index == 0:
            captured_context = self._spec.context if self._spec.resources.cuda_graphs else None
            self._attention, report = choose_attention(shape, self._device, captured_context)
            return from_leader(report) if self._group.size > 1 else report
        report = from_leader(AttentionReport(SdpaGather.name))
        self._attention = create_backend(report, shape, self._device)
        return report

    def allocate(self, pages: int) -> None:
        """Allocates the cache; `pages` is equal on all ranks."""
        spec = self._spec
        assert self._model is not None, "load first"
        assert self._attention is not None, "load first"
        page_size = spec.cache.page_size
        product = InvariantProducts() if spec.invariant else projection
        compile_function = compile_invariant if spec.invariant else torch.compile
        decoder = decoder_for(self._model.eval(), product, spec.context, compile_function)
        buckets = self._buckets(self._attention)
        self._runner = ModelRunner(
            self._model,
            pages,
            page_size,
            self._attention,
            decoder,
            capture=self._capture(pages),
            context=spec.context,
            is_checked=True,  # the leader checked the model while loading
            vocabulary=spec.vocabulary if self._index == 0 or decoder.shard.group.size > 1 else None,
            recording=recording_on(self._device, self._attention, decoder, buckets) if buckets else None,
            ranks=spec.ranks,
        )
        self._model = None  # the runner holds the parts that it needs
        if self._device.type == "cuda" and spec.ranks > 1:
            _check_equal("captures steps as CUDA graphs", self._runner.is_captured)
        self._runner.capture_steps()
        self._leading = LeadingRunner(self._runner, self._followers) if self._followers else self._runner
        grammars = grammars_of(lambda: load_grammar_vocabulary(Path(spec.folder))) if self._index == 0 else None
        self._executor = StepExecutor(self._leading, spec.vocabulary, grammars=grammars)
        self._pages = pages
        if self._device.type == "cpu":
            use_huge_pages()

    def _capture(self, pages: int) -> StateCapture | None:
        if self._captured is None:
            return None
        return StateCapture(self._captured, pages, self._spec.cache.page_size, self._device, self._project)

    def profile(self) -> ForwardCost:
        """Measures step costs on the leader; followers must be in `follow`."""
        assert self._leading is not None, "allocate first"
        return profile_steps(self._leading, self._spec.cache.page_size, self._pages, self._spec.sessions)

    def check_invariance(self, trees: bool) -> str:
        """Returns why logits may depend on the step; empty if they do not. Followers must be in `follow`."""
        assert self._leading is not None, "allocate first"
        if self._is_recurrent:
            return "recurrent layers depend on the number of tokens in a row"
        check = InvarianceCheck(self._leading, self._spec.cache.page_size, self._pages, self._spec.context, trees)
        return check.fault()

    def follow(self) -> None:
        """Runs the leader's forwards on a follower until the leader exits."""
        assert self._runner is not None, "allocate first"
        assert self._leader is not None, "only followers follow"
        freeze_heap()
        while True:
            rows, copies, moves, draws = decode_forward(self._leader.receive())
            self._runner.forward(rows, copies, moves=moves, draws=draws)

    def listen(self) -> tuple[str, str]:
        """Creates two links on the leader and returns their paths: one for steps, one for preparing grammars during
        steps.
        """
        self._listener = StepListener()
        self._grammar_listener = StepListener()
        return self._listener.path, self._grammar_listener.path

    def lead(self) -> None:
        """Computes step plans on the leader until the coordinator disconnects."""
        assert self._executor is not None, "allocate first"
        assert self._listener is not None, "listen first"
        assert self._grammar_listener is not None, "listen first"
        freeze_heap()
        executor = self._executor
        steps = StepDecoder()

        def answer(request: bytes) -> bytes:
            plan = steps.request(request)
            return executor.read(plan) if isinstance(plan, StateRead) else steps.outcomes(executor.step(plan))

        def prepare(grammar: bytes) -> bytes:
            return (executor.prepare(grammar.decode()) or "").encode()

        Thread(target=self._grammar_listener.serve, args=(prepare,), daemon=True).start()
        self._listener.serve(answer)


class RankGroup:
    """Engine of a target replica: all of its ranks."""

    def __init__(
        self,
        ranks: Sequence[Any],
        reports: Sequence[RankReport],
        step_cost: ForwardCost,
        leader: StepCaller,
        grammar_caller: StepCaller,
        running: Sequence[Any],
    ) -> None:
        self.reports = tuple(reports)  # by rank
        self.pids = tuple(report.pid for report in reports)
        self.pages = min(report.pages for report in reports)  # cache pages on each rank
        self.takes_trees = all(report.attention.takes_trees for report in reports)
        self.step_cost = step_cost  # measured before serving
        self._ranks = ranks
        self._leader = leader
        self._grammar_caller = grammar_caller
        self._grammar_lock = asyncio.Lock()
        self._encoder = StepEncoder()
        self._running = running  # one unfinished call per rank; each ends only when its rank fails
        self._is_hung = asyncio.Event()  # set if a live rank does not answer

    @classmethod
    async def start(cls, spec: RankSpec, group: PlacementGroup | None) -> "RankGroup":
        """Starts the ranks in the replica's placement group, loads the model and measures step costs."""
        actor = ray.remote(Rank)
        ranks = []
        for index in range(spec.ranks):
            options = actor_options(spec.resources)
            if group is not None:
                options.pop("label_selector", None)  # the group's bundles already specify it
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
                )
            ranks.append(actor.options(**options).remote(index, spec))
        leader, *followers = ranks
        meeting_point = await leader.free_address.remote()
        reports: list[RankReport] = await asyncio.gather(*(rank.load.remote(meeting_point) for rank in ranks))
        pages = min(report.pages for report in reports)
        await asyncio.gather(*(rank.allocate.remote(pages) for rank in ranks))
        following = [rank.follow.remote() for rank in followers]
        step_cost: ForwardCost = await or_rank_failure(leader.profile.remote(), following)
        if spec.invariant:
            trees = all(report.attention.takes_trees for report in reports)
            fault: str = await or_rank_failure(leader.check_invariance.remote(trees), following)
            if fault:
                log.error("model.numerics: invariant is not guaranteed here: %s; set it to fast", fault)
            numerics = f"fast: {fault}" if fault else "invariant"
            reports = [replace(report, numerics=numerics) for report in reports]
        steps_path, grammar_path = await leader.listen.remote()
        leading = leader.lead.remote()
        callers = await StepCaller.dial(steps_path), await StepCaller.dial(grammar_path)
        return cls(ranks, reports, step_cost, *callers, [leading, *following])

    def step(self, plan: StepPlan) -> Awaitable[list[Outcome]]:
        """Sends a plan; returns its outcomes. The result raises EngineError if a rank has died or its step failed."""
        return self._outcomes(self._leader.call(self._encoder.step(plan)))

    async def _outcomes(self, answer: asyncio.Future[bytes]) -> list[Outcome]:
        return self._encoder.outcomes(await self._answered(answer))

    async def read(self, read: StateRead) -> bytes:
        """Reads hidden states; raises as `step` does."""
        return await self._answered(self._leader.call(self._encoder.read(read)))

    async def prepare(self, grammar: str) -> str | None:
        """Compiles a grammar; raises as `step` does. Cancellation does not stop the compilation."""
        return await asyncio.shield(asyncio.ensure_future(self._prepare(grammar)))

    async def _prepare(self, grammar: str) -> str | None:
        try:
            async with self._grammar_lock:
                return (await within(PREPARE_S, self._grammar_caller.call(grammar.encode()))).decode() or None
        except TimeoutError:
            self._is_hung.set()
            await self.watch()
        except ConnectionError:
            await self.watch()

    async def _answered(self, answer: asyncio.Future[bytes]) -> bytes:
        try:
            return await answer
        except ConnectionError:
            await self.watch()

    async def watch(self) -> NoReturn:
        """Waits until a rank ends or hangs, then raises EngineError."""
        await raise_when_any_ends([*self._running, self._raise_if_hung()])

    async def _raise_if_hung(self) -> NoReturn:
        await self._is_hung.wait()
        raise EngineError(f"a rank has not compiled a grammar within {PREPARE_S:g} s")

    async def close(self) -> None:
        self._leader.close()
        self._grammar_caller.close()
        for rank in self._ranks:
            ray.kill(rank)
