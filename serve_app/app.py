"""The Serve application: one config in, three bound deployments out.

`serve deploy`, KubeRay and the command line all come through `build`, with what `config_split` gives to each
deployment.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve

from cluster.config import Replicas, ServerConfig, SlipstreamConfig, validated
from cluster.placement import ALONE_POLICY, actor_options, bounds, scaling_settings, target_group_options
from serve_app.api.replies import RETRY_AFTER_S
from serve_app.deployments import DraftDeployment, RouterDeployment, TargetDeployment
from serve_app.serve_manifest import APPLICATION as APPLICATION
from serve_app.serve_manifest import ROUTER_OPTIONS, router_sizes

HEALTH = {"health_check_period_s": 1, "health_check_timeout_s": 10}
POOL_SHUTDOWN = {"graceful_shutdown_wait_loop_s": 0.5, "graceful_shutdown_timeout_s": 10}
ENDS_S = POOL_SHUTDOWN["graceful_shutdown_timeout_s"]  # what a target has left to end in once it has drained


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application for a config given as a mapping; raises ConfigError naming what is wrong in it."""
    return application(validated(args))


def application(config: SlipstreamConfig) -> serve.Application:
    """Binds router, draft pool and target pool."""
    target = serve.deployment(TargetDeployment, name="Target").options(
        **target_group_options(config.target),
        autoscaling_config=_scaling(config.target.replicas),
        user_config=scaling_settings(config.target, config.draft),
        **HEALTH,
        **_logging(config.server),
        **(POOL_SHUTDOWN | {"graceful_shutdown_timeout_s": config.target.drain_s + ENDS_S}),
    )
    drafter = serve.deployment(DraftDeployment, name="Drafter").options(
        ray_actor_options=actor_options(config.draft.resources),
        autoscaling_config=_scaling(config.draft.replicas),
        **HEALTH,
        **_logging(config.server),
        **POOL_SHUTDOWN,
    )
    router = serve.deployment(RouterDeployment, name="Router").options(
        **router_sizes(config.server),
        backpressure_config={"status_code": 429, "retry_after_s": RETRY_AFTER_S},
        # A router that was full has room again at once, for it refuses most of what it is given.
        request_router_config={"max_backoff_s": 0.05},
        ray_actor_options=dict(ROUTER_OPTIONS),
        max_surge_percent=100,  # of an update: new requests are taken while those that run are finished
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1,
        **_logging(config.server),
    )
    targets = target.bind(config)
    return router.bind(config, targets, drafter.bind(config, targets))


def _scaling(replicas: Replicas) -> dict[str, Any]:
    return {**bounds(replicas), "policy": dict(ALONE_POLICY)}


def _logging(server: ServerConfig) -> dict[str, Any]:
    """Text is as Serve's own configuration has it, which may name something else."""
    return {} if server.log_format == "text" else {"logging_config": {"encoding": "JSON"}}
