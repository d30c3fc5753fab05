"""Ray Serve deployments: run targets, drafters, routers and the trainer in processes with health checks.

Each `__init__` starts its parts in order and registers their shutdown on one exit stack, so a replica stops in reverse
order, even after a failed start. `app.py` connects the deployments.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, TypeVar

import torch
from fastapi import FastAPI
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.drafter import Drafter, DraftingThread, MethodFigures, TargetAccess
from actors.engine.process import compute_in_background, freeze_heap, use_cpu
from actors.learning.reload import DraftReload
from actors.net.credentials import credentials_of
from actors.servers import GrpcServer, serve_drafter, serve_target
from actors.target import TargetReplica
from actors.tracing import ServiceTracing
from cluster.autoscaling import DraftReport, Settings, TargetReport, as_numbers
from cluster.config import SlipstreamConfig, SpeculationConfig, of_drafters
from cluster.config_sections import TracingConfig
from cluster.drafting.method import ExchangesWeights
from cluster.errors import EngineError
from cluster.routing.ray_membership import ADDRESS, COSTS, TRANSLATES, addresses, running_replicas
from cluster.speculation.controller import Adaptive, LockStep, PacingPolicy
from cluster.telemetry import Actor, Timeline, pack
from cluster.trust import PeerRole
from serve_app.api.replies import HealthReport
from serve_app.page.routes import DraftSample, TargetSample, TrainerSample, draft_sample, target_sample
from serve_app.publishing.aggregate_metrics import AggregateMetrics, with_labels
from serve_app.publishing.gauges import drafter_levels, target_levels, trainer_levels, version_levels
from serve_app.publishing.ray_mirror import RayMirror
from serve_app.publishing.serve_replicas import own_deployment, packed, replicas_metrics
from serve_app.replica_counters import (
    attention_counts,
    counted_families,
    drafter_counts,
    kept_states_counts,
    target_counts,
    version_counts,
)
from serve_app.serve_manifest import draft_templates, with_own_part
from serve_app.startup import (
    StartedDrafter,
    engine_of,
    listening_host,
    location,
    log_under_serve,
    start_drafter,
    start_target,
    start_trainer,
    with_start_timeout,
)

log = logging.getLogger("ray.serve")
Result = TypeVar("Result")

REMOVAL_CHECK_PERIOD_S = 0.5
DRAFTER_LEAVES_S = 5.0  # seconds for routers to move a drafter's sessions; without another, targets decode alone
LOOK_PERIOD_S = 2.0  # seconds between a trainer's checks for new examples


def pacing_policy(speculation: SpeculationConfig) -> PacingPolicy:
    """Returns the configured pacing policy."""
    return LockStep() if speculation.is_lock_step else Adaptive()


def _status(is_ready: bool) -> Literal["ok", "unavailable"]:
    return "ok" if is_ready else "unavailable"


async def run_logged(name: str, loop: Coroutine[Any, Any, None]) -> None:
    """Runs a replica's loop. Logs a failure with its traceback, then raises EngineError with its type and message."""
    try:
        await loop
    except Exception as error:
        log.exception("%s has ended", name)
        raise EngineError(f"{name} has ended: {type(error).__name__}: {error}") from error
    raise EngineError(f"{name} has ended")


def check_running(work: asyncio.Task[None]) -> None:
    """Raises the failure of a loop if it has ended."""
    if work.done() and not work.cancelled():
        work.result()


async def _wait_unless_failed(work: asyncio.Task[None], leaving: Coroutine[Any, Any, None]) -> None:
    """Waits until the replica has left or its work has failed."""
    task = asyncio.create_task(leaving)
    await asyncio.wait((task, work), return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _ReplicaDeployment:
    """Base class of the deployments: health, metrics, recordings and orderly shutdown."""

    role: ClassVar[str]
    _ending: AsyncExitStack  # stops the started parts in reverse order, even after a failed start
    _work: asyncio.Task[None]
    _mirror: RayMirror
    _timeline: Timeline

    def _begin(self) -> None:
        self._ending = AsyncExitStack()
        log_under_serve()

    def _start_tracing(self, tracing: TracingConfig, service: str) -> ServiceTracing:
        started = ServiceTracing(tracing, service)
        self._ending.push_async_callback(asyncio.to_thread, started.close)
        return started

    def _start_work(self, name: str, loop: Coroutine[Any, Any, None]) -> None:
        """Starts the replica's loop, once everything else has started."""
        freeze_heap()
        self._work = asyncio.create_task(run_logged(name, loop))

    def _families(self) -> Iterator[Metric]:
        """Yields this replica's metric families."""
        raise NotImplementedError

    def check_health(self) -> None:
        """Publishes metrics. Raises if the replica has failed. Serve calls this every second, on a thread."""
        check_running(self._work)
        self._mirror.publish()

    def metrics(self) -> bytes:
        """Returns this replica's metric families for `/metrics`."""
        return packed(self._families())

    def trace(self) -> bytes:
        """Returns recent events, apart from `inspect` to keep its result small."""
        return pack(Actor(self.role, f"{self.role} {os.getpid()}", self._timeline.recording()))

    async def _stop(self, server: GrpcServer) -> None:
        await server.stop()
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)

    async def __del__(self) -> None:
        """Stops the replica once its sessions have left. Serve calls this and waits."""
        await self._ending.aclose()


class TargetDeployment(_ReplicaDeployment):
    """Coordinator of one target replica: owns the ranks, verifies drafts, and serves gRPC."""

    role = "target"

    async def __init__(self, config: SlipstreamConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._begin()
        tracing = self._start_tracing(config.tracing, "target")
        self._engine_name = engine_of(config.target, serve.get_replica_context().rank.rank)
        starting = start_target(config, self._engine_name)
        files, started = await with_start_timeout(config.target.start_timeout_s, "target.start_timeout_s", starting)
        self._engine = started.engine
        self._ending.push_async_callback(self._engine.close)
        self._replica = TargetReplica(
            self._engine,
            started.limits,
            files.vocabulary_print,
            files.model_print,
            config.target.step_timeout_s,
            pacing_policy(config.speculation),
            self._engine.step_cost,
            tracer=tracing.sessions("verify"),
            memory=started.memory,
        )
        self._timeline = self._replica.timeline
        self._attention = attention_counts([report.attention for report in self._engine.reports])
        self._method = config.draft.method
        self._report = TargetReport()  # latest report to the autoscaling policy
        self._scaling: Settings = {}  # scaling settings of both pools, from `user_config`
        self._model = config.model.name
        self._mirror = RayMirror(self._families)
        self._server = await serve_target(self._replica, listening_host(config.trust), trust=config.trust)
        self._drain_s = config.target.drain_s
        self._start_work("the verification loop", self._serve())
        self._ending.push_async_callback(self._leave)

    async def _serve(self) -> None:
        """Verifies until a rank or a step fails, then closes all streams so that peers notice immediately."""
        tasks = [asyncio.create_task(self._replica.run()), asyncio.create_task(self._engine.watch())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await self._server.stop(grace_s=0)

    async def reconfigure(self, scaling: Settings) -> None:
        """Applies `user_config`. Serve calls this before the replica serves, and after every change."""
        self._scaling = scaling

    def record_replica_metadata(self) -> dict[str, str]:
        return {ADDRESS: self._server.address, **location(), COSTS: self._engine.step_cost.model_dump_json()}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load for autoscaling. Serve calls this every two seconds on the event loop."""
        self._report = self._replica.report()
        return {**asdict(self._report), **as_numbers(self._scaling)}

    def check_health(self) -> None:
        super().check_health()
        if (stuck_s := self._replica.stuck_s) is not None:
            raise EngineError(f"the current step has run for {stuck_s:.0f} s")

    def _families(self) -> Iterator[Metric]:
        scheduler = self._replica.scheduler
        counts = counted_families({**target_counts(self._replica, self._method), **self._attention})
        levels = target_levels(scheduler.reporter.activity(), scheduler.admission.preempted, self._model)
        yield from with_labels(chain(counts, levels), {"model": self._model})

    def inspect(self) -> dict[str, Any]:
        """Returns this replica's state and counters, for status and tests."""
        scheduler = self._replica.scheduler
        load = scheduler.controller.load
        return {
            "pid": os.getpid(),
            "engine": self._engine_name,
            "rank_pids": self._engine.pids,
            "loading": [asdict(report.load) for report in self._engine.reports],
            "attention": [asdict(report.attention) for report in self._engine.reports],
            "numerics": sorted({report.numerics for report in self._engine.reports}),
            "idle": self._replica.is_idle,
            "dropped": dict(scheduler.counts.dropped),
            "rebased": scheduler.counts.rebased,
            "desyncs": scheduler.draft_quality.desyncs,
            "preempted": scheduler.admission.preempted,
            "known_tokens": scheduler.counts.known_tokens,
            "states": scheduler.feeds.counts,
            "accepted_tokens": scheduler.counts.accepted_tokens,
            "wasted_tokens": scheduler.counts.wasted_tokens,
            "step_s": scheduler.counts.step_s,
            "idle_s": scheduler.counts.idle_s,
            "pages": scheduler.page_counts,
            "speculation": {
                "non_speculative_rate": load.non_speculative_rate,
                "gain": load.gain,
                "on": float(load.speculates),
            },
            "costs": load.step.cost.model_dump_json(),
            "non_speculative_costs": cost.model_dump_json() if (cost := load.step.non_speculative_cost) else None,
            "acceptance": asdict(scheduler.controller.acceptance),
            "tally": scheduler.draft_quality.acceptance.rows(),
            "refused": dict(self._replica.refused),
            "refusals": dict(self._replica.scheduler.refusals.counts),
            "report": asdict(self._report),
            "scaling": self._scaling,
            **scheduler.load(),
        }

    async def sample(self) -> TargetSample:
        """Returns a sample for the live page."""
        return target_sample(self._replica, f"target {os.getpid()}")

    async def _leave(self) -> None:
        await _wait_unless_failed(self._work, self._replica.leave(self._drain_s))
        await self._stop(self._server)


class DraftDeployment(_ReplicaDeployment):
    """Process of one drafter: model, drafting loop and gRPC server."""

    role = "drafter"

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: Sequence[SlipstreamConfig], targets: Mapping[str, DeploymentHandle[Any]]
    ) -> None:
        """`models` share the drafters; `targets` are their target pools, by model name."""
        self._begin()
        for pool in targets.values():
            addresses(pool)  # starts reading the membership while the method loads
        models = [with_own_part(one, os.environ) for one in models]
        config = of_drafters(models)
        use_cpu(config.draft.resources)
        starting = asyncio.to_thread(start_drafter, models)
        started = await with_start_timeout(config.draft.start_timeout_s, "draft.start_timeout_s", starting)
        self._costs = started.costs
        tracing = self._start_tracing(config.tracing, "drafter")
        is_background = config.draft.resources.background
        self._drafter = Drafter(
            started.method,
            started.limits,
            started.models,
            draft_ahead=not config.speculation.is_lock_step,
            # A background process may wait forever for a core and still be healthy.
            thread=(
                DraftingThread(prepare=compute_in_background, clock=time.process_time)
                if is_background
                else DraftingThread()
            ),
            figures=MethodFigures(
                cost=self._costs, first_token_acceptance=started.first_token_acceptance, version=started.version
            ),
            access=TargetAccess(
                credentials=credentials_of(config.trust, PeerRole.DRAFTER),
                known=lambda model: addresses(targets[model]),
            ),
            tracer=tracing.sessions("draft"),
        )
        self._ending.push_async_callback(self._drafter.close)
        self._timeline = self._drafter.timeline
        self._method = config.draft.method
        self._translates = "yes" if started.is_translated else ""
        self._report = DraftReport()  # latest report to the autoscaling policy
        self._mirror = RayMirror(self._families)
        self._server = await serve_drafter(self._drafter, listening_host(config.trust), trust=config.trust)
        self._start_work("the drafting loop", self._drafter.run())
        self._recorder = started.recorder
        if started.recorder is not None:
            self._ending.push_async_callback(asyncio.to_thread, started.recorder.end)
        self._ending.push_async_callback(self._leave)
        self._reload = self._start_reload(started, is_background)

    def _start_reload(self, started: StartedDrafter, is_background: bool) -> DraftReload | None:
        """Starts loading new versions of the draft if it learns."""
        if started.learned is None:
            return None
        assert isinstance(started.method, ExchangesWeights), "the configuration allows no other methods"
        prepare = compute_in_background if is_background else None
        reload = DraftReload(started.learned, started.method, self._drafter, prepare_thread=prepare)
        self._reloading = asyncio.create_task(run_logged("the watch on the draft's version", reload.run()))
        self._ending.callback(reload.close)
        self._ending.callback(self._reloading.cancel)
        return reload

    def record_replica_metadata(self) -> dict[str, str]:
        own = {ADDRESS: self._server.address, COSTS: self._costs.model_dump_json(), TRANSLATES: self._translates}
        return own | location()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load for autoscaling, as for targets."""
        self._report = self._drafter.report()
        return asdict(self._report)

    def check_health(self) -> None:
        super().check_health()
        if self._reload is not None:
            check_running(self._reloading)
        if (stuck_s := self._drafter.stuck_s) is not None:
            raise EngineError(f"the current drafting pass has run for {stuck_s:.0f} s")

    def _families(self) -> Iterator[Metric]:
        yield from counted_families(drafter_counts(self._drafter))
        yield from drafter_levels(self._drafter.scheduler.load(), dict(self._drafter.pass_s))
        if self._reload is not None:
            yield from counted_families(version_counts(self._reload.counts))
            yield from version_levels(self._reload.summary())
        if self._recorder is not None:
            yield from counted_families(kept_states_counts(self._recorder.counts))

    def inspect(self) -> dict[str, Any]:
        """Returns this drafter's state and counters, for status and tests."""
        return {
            "pid": os.getpid(),
            "idle": self._drafter.is_idle,
            "name": self._drafter.peer_id,
            "address": self._server.address,
            "method": self._method,
            "load_check": self._drafter.scheduler.sessions.load_check.summary(),
            "counts": dict(self._drafter.scheduler.counts),
            "kept_states": {} if self._recorder is None else dict(self._recorder.counts),
            "draft_version": None if self._reload is None else self._reload.summary(),
            "costs": self._drafter.timing.cost.model_dump_json(),
            "refused": dict(self._drafter.refused),
            "refusals": dict(self._drafter.scheduler.refusals.counts),
            "report": asdict(self._report),
            **self._drafter.scheduler.load(),
        }

    async def sample(self) -> DraftSample:
        """Returns a sample for the live page."""
        return draft_sample(self._drafter, f"drafter {os.getpid()}", self._method)

    async def _leave(self) -> None:
        if self._drafter.stuck_s is None:
            await _wait_unless_failed(self._work, self._drafter.leave(DRAFTER_LEAVES_S))
        await self._stop(self._server)


class TrainerDeployment(_ReplicaDeployment):
    """Process that trains versions of the draft on examples."""

    role = "trainer"

    async def __init__(self, config: SlipstreamConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._begin()
        config = with_own_part(config, os.environ)
        learning = config.draft.learning
        assert learning is not None, "a trainer requires a draft that learns"
        use_cpu(learning.resources)
        is_background = learning.resources.background
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="training", initializer=compute_in_background if is_background else None
        )
        self._is_stopping = threading.Event()
        self._timeline = Timeline(time.monotonic)
        self._trainer = await self._on_thread(partial(start_trainer, config, self._is_stopping))
        self._mirror = RayMirror(self._families)
        self._start_work("the training loop", self._train())
        self._ending.push_async_callback(self._stop_training)

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _train(self) -> None:
        while not self._is_stopping.is_set():
            await self._on_thread(self._trainer.look)
            await asyncio.sleep(LOOK_PERIOD_S)

    def _families(self) -> Iterator[Metric]:
        yield from trainer_levels(self._trainer.status())

    def inspect(self) -> dict[str, Any]:
        """Returns the trainer's state and results, for status and tests."""
        return {"pid": os.getpid(), **asdict(self._trainer.status())}

    async def sample(self) -> TrainerSample:
        """Returns a sample for the live page."""
        return TrainerSample(f"trainer {os.getpid()}", await asyncio.to_thread(self._trainer.status))

    async def _stop_training(self) -> None:
        """Interrupts a training and waits for its state to be saved; the next trainer continues from there."""
        self._is_stopping.set()
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)


@serve.ingress()
class RouterDeployment(_ReplicaDeployment):
    """Process of one router, with the HTTP API."""

    role = "router"

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: SlipstreamConfig, pools: Mapping[str, DeploymentHandle[Any]]
    ) -> None:
        """`pools` are the other deployments, by name."""
        self._begin()
        from serve_app.api.access import AdminAddress, ServeRequestIds
        from serve_app.api.failures import RefuseWhenStopped
        from serve_app.api.metrics import Metrics
        from serve_app.api.routes import create_api
        from serve_app.api.template_process import TemplateProcess
        from serve_app.audit_alarm import AuditAlarm
        from serve_app.page.routes import PageWatch, PoolSamples, page_routes
        from serve_app.routed_model import fetch_tokenizers, start_model

        config = with_own_part(config, os.environ)
        torch.set_num_threads(1)
        templates = draft_templates(config, os.environ)
        names = [*(one.config.model.target for one in config.served), *templates.values()]
        folders = await fetch_tokenizers(names, max(one.config.target.start_timeout_s for one in config.served))
        self._timeline = Timeline(time.monotonic)
        tracing = self._start_tracing(config.tracing, "router")
        http_tracing = self._start_tracing(config.tracing, "http")
        render = TemplateProcess()
        self._ending.push_async_callback(asyncio.to_thread, render.close)
        audit = config.server.audit
        alarm = AuditAlarm(audit.records, audit.max_record_bytes)
        self._models = [
            start_model(
                one,
                folders[one.config.model.target],
                pools,
                ending=self._ending,
                tracing=tracing,
                timeline=self._timeline,
                render=render,
                alarm=alarm,
                draft_template=folders[templates[one.drafter]] if one.drafter in templates else None,
            )
            for one in config.served
        ]
        self._routers = [one.router for one in self._models]
        by_model = {name: metrics for one in self._models for name, metrics in one.metrics().items()}
        self._metrics = Metrics(by_model=by_model) if len(by_model) > 1 else by_model[config.model.name]
        self._mirror = RayMirror(self._families)
        watch = PageWatch(", ".join(by_model), PoolSamples(*pools.values()))
        self._api = create_api(
            [one.service for one in self._models],
            config,
            self._metrics,
            self._health,
            page_routes(watch) if config.server.page else [],
            http_tracing.tracer,
            AggregateMetrics([replicas_metrics(pool) for pool in (own_deployment(), *pools.values())]),
        )
        self._api.add_middleware(RefuseWhenStopped, has_stopped=lambda: all(one.has_ended for one in self._routers))
        self._api.add_middleware(ServeRequestIds)
        at = config.server.admin
        if at.port:
            self._ending.push_async_callback(AdminAddress(self._api, at.host, at.port).close)
        self._start_work("the routers' membership loop", self._follow_members())
        following = self._watch_removal(config.server.drain_s)
        self._stop_watch = asyncio.create_task(run_logged("the watch for this router's own stop", following))
        self._ending.push_async_callback(self._stop_working)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._api

    async def _follow_members(self) -> None:
        await asyncio.gather(*(one.run() for one in self._routers))

    async def _health(self) -> HealthReport:
        """Reports the models that can be served; one of them is enough to be healthy."""
        models = {one.name: _status(one.router.is_ready) for one in self._models}
        audits = {one.audits.state for one in self._routers}
        audit = next(state for state in ("differs", "ok", "off") if state in audits)
        return HealthReport(status=_status("ok" in models.values()), models=models, audit=audit)

    async def drain(self, within_s: float | None = None) -> None:
        """Refuses new requests, and ends those still running after `within_s` with an error.

        A coroutine: Serve would run a plain function on a thread instead of the event loop.
        """
        for one in self._routers:
            one.drain(within_s)

    async def _watch_removal(self, drain_s: float) -> None:
        """Ends requests that outlast `drain_s` after Serve stops this replica, before Serve kills it.

        Serve does not notify the replica, but removes it from the list of replicas that receive requests. An update of
        options also removes it briefly.
        """
        own = own_deployment()
        name = str(serve.get_replica_context().replica_id)
        was_listed = False
        while True:
            is_listed = name in running_replicas(own)
            was_listed = was_listed or is_listed
            for one in self._routers if was_listed else ():
                one.cancel_end() if is_listed else one.end_after(drain_s)
            await asyncio.sleep(REMOVAL_CHECK_PERIOD_S)

    def check_health(self) -> None:
        super().check_health()
        check_running(self._stop_watch)

    def _families(self) -> Iterator[Metric]:
        yield from self._metrics.families()
        for one in self._models:
            yield from one.families()

    def inspect(self) -> dict[str, Any]:
        """Returns this router's state and counters, for status and tests."""
        from serve_app.routed_model import summed

        return {"pid": os.getpid(), **summed([one.inspect() for one in self._models])}

    async def _stop_working(self) -> None:
        tasks = (self._work, self._stop_watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
