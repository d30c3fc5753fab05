"""Tests the deployments' use of the configuration."""

import asyncio
import logging
import threading
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

import pytest

from cluster.config import CacheConfig, SpeculationConfig, TargetPool, TargetReplicas, validated
from cluster.errors import EngineError, ModelError
from cluster.speculation.controller import Adaptive, LockStep, PacingPolicy
from serve_app import deployments, routed_model, startup
from serve_app.api import template_process
from serve_app.app import application
from serve_app.deployments import DraftDeployment, RouterDeployment, TargetDeployment, pacing_policy
from serve_app.startup import engine_of


@pytest.mark.parametrize(
    ("speculation", "policy"),
    [
        (SpeculationConfig(), Adaptive),
        (SpeculationConfig(schedule="adaptive"), Adaptive),
        (SpeculationConfig(schedule="lock_step"), LockStep),
    ],
    ids=["default", "adaptive", "lock_step"],
)
def test_the_configured_pacing_is_used(speculation: SpeculationConfig, policy: type[PacingPolicy]) -> None:
    assert type(pacing_policy(speculation)) is policy


def test_serves_queue_is_limited_and_answered_like_the_router() -> None:
    config = validated({"model": {"target": "toy"}, "draft": {"method": "ngram"}, "server": {"max_requests": 10}})
    router = application(config)._bound_deployment  # Serve has no public accessor
    assert (router.max_ongoing_requests, router.max_queued_requests) == (20, 10)
    assert (router.backpressure_config.status_code, router.backpressure_config.retry_after_s) == (429, 1)


def test_drafters_and_routers_share_the_target_pool() -> None:
    config = validated({"model": {"target": "toy"}, "draft": {"method": "ngram"}})
    _, pools = application(config)._bound_deployment.init_args
    assert pools["Drafter"]._bound_deployment.init_args[1] == {"toy": pools["Target"]}


@pytest.mark.parametrize(("log_format", "expected"), [("text", None), ("json", {"encoding": "JSON"})])
def test_the_log_format_applies_to_all_replicas(log_format: str, expected: dict[str, str] | None) -> None:
    config = validated({"model": {"target": "toy"}, "draft": {"method": "ngram"}, "server": {"log_format": log_format}})
    router = application(config)._bound_deployment
    replicas = [router, *(pool._bound_deployment for pool in router.init_args[1].values())]
    assert [one.name for one in replicas] == ["Router", "Target", "Drafter"]
    for one in replicas:
        encoding = None if one.logging_config is None else {"encoding": one.logging_config["encoding"]}
        assert encoding == expected


@pytest.mark.parametrize(
    ("engine", "of_replicas"),
    [
        ("slipstream", ["slipstream", "slipstream", "slipstream"]),
        ("vllm", ["vllm", "vllm", "vllm"]),
        ("mixed", ["slipstream", "vllm", "slipstream"]),
    ],
)
def test_replicas_use_the_engine_of_their_pool(engine: str, of_replicas: list[str]) -> None:
    pool = TargetPool(engine=engine, cache_per_rank=CacheConfig(gib=1), replicas=TargetReplicas(max=3))
    assert [engine_of(pool, replica) for replica in range(3)] == of_replicas


CONFIG = validated({"model": {"target": "toy"}, "draft": {"method": "ngram"}})
POOLS = {"Target": MagicMock(), "Drafter": MagicMock()}
ends_once = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # Python calls `__del__` again


@ends_once
@pytest.mark.parametrize(
    ("deployment", "arguments", "module"),
    [
        (TargetDeployment, (CONFIG,), startup),
        (DraftDeployment, ([CONFIG], {"toy": POOLS["Target"]}), startup),
        (RouterDeployment, (CONFIG, POOLS), routed_model),
    ],
)
async def test_a_replica_that_failed_at_startup_closes_nothing(deployment: Any, arguments: Any, module: Any) -> None:
    replica = deployment.__new__(deployment)  # like Serve, which calls `__del__` even after a failed start
    with (
        patch.object(module, "local_folder", side_effect=ModelError("no such model")),
        patch.object(template_process, "TemplateProcess"),
        patch.object(deployments, "serve"),
        pytest.raises(ModelError),
    ):
        await replica.__init__(*arguments)
    await replica.__del__()


@ends_once
@pytest.mark.parametrize(
    ("deployment", "module"),
    [(TargetDeployment, startup), (DraftDeployment, startup), (RouterDeployment, routed_model)],
)
async def test_a_hanging_download_times_out(deployment: Any, module: Any) -> None:
    hung = threading.Event()
    replica = deployment.__new__(deployment)
    limits = {"start_timeout_s": 1e-3}
    config = validated({"model": {"target": "toy"}, "target": limits, "draft": {"method": "ngram", **limits}})
    arguments: Any = {
        TargetDeployment: (config,),
        DraftDeployment: ([config], {"toy": POOLS["Target"]}),
        RouterDeployment: (config, POOLS),
    }
    with (
        patch.object(module, "local_folder", side_effect=lambda *_, **__: hung.wait()),
        patch.object(deployments, "serve"),
        pytest.raises(EngineError, match=r"start_timeout_s"),
    ):
        await replica.__init__(*arguments[deployment])
    hung.set()
    await replica.__del__()


@ends_once
async def test_started_parts_are_closed_if_a_later_one_fails() -> None:
    started = MagicMock(engine=MagicMock(close=AsyncMock(), reports=()))
    tracing = MagicMock()
    replica = TargetDeployment.__new__(TargetDeployment)
    with (
        patch.multiple(
            deployments,
            serve=MagicMock(),
            ServiceTracing=MagicMock(return_value=tracing),
            listening_host=MagicMock(),
            start_target=AsyncMock(return_value=(MagicMock(), started)),
            TargetReplica=MagicMock(),
            serve_target=AsyncMock(side_effect=EngineError("no port is free")),
        ),
        pytest.raises(EngineError),
    ):
        await replica.__init__(CONFIG)  # type: ignore[misc]  # as Serve does it
    started.engine.close.assert_not_awaited()
    await replica.__del__()
    started.engine.close.assert_awaited_once_with()
    tracing.close.assert_called_once_with()


class Broken(Exception):
    """Unexpected error in a loop."""


async def test_health_reports_a_failed_loop_and_logs_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "log", logging.getLogger(__name__))  # pytest 8's caplog misses Ray's loggers

    async def loop() -> None:
        raise Broken("position 64 is out of range")

    work = asyncio.create_task(deployments.run_logged("the drafting loop", loop()))
    deployments.check_running(work)
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([work])
    for _ in range(2):
        with pytest.raises(EngineError, match="the drafting loop has ended: Broken: position 64 is out of range"):
            deployments.check_running(work)
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("ERROR", "the drafting loop has ended")
    assert record.exc_info[0] is Broken


async def test_a_cancelled_loop_reports_nothing() -> None:
    work = asyncio.create_task(deployments.run_logged("a loop", asyncio.Event().wait()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait([work])
    deployments.check_running(work)


def test_a_trainer_is_deployed_only_where_the_draft_learns():
    draft = {"method": "draft_model", "model": "models/draft"}
    learning = draft | {"learning": {"folder": "/learning", "resources": {"num_cpus": 2}}}
    model = {"target": "models/target"}
    _, pools = application(validated({"model": model, "draft": draft}))._bound_deployment.init_args
    assert list(pools) == ["Target", "Drafter"]
    _, pools = application(validated({"model": model, "draft": learning}))._bound_deployment.init_args
    trainer = pools["Trainer"]
    assert trainer._bound_deployment.name == "Trainer"
    assert trainer._bound_deployment.ray_actor_options["num_cpus"] == 2
