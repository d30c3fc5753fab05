"""The Serve application: turns one configuration into bound deployments.

`serve deploy`, KubeRay and the command line all use `build`, with the per-deployment parts from `serve_manifest`.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve

from cluster.config import LearningOptions, Replicas, ServerConfig, SlipstreamConfig, validated
from cluster.placement import ALONE_POLICY, actor_options, bounds, scaling_settings, target_group_options
from serve_app.api.replies import RETRY_AFTER_S
from serve_app.deployments import DraftDeployment, RouterDeployment, TargetDeployment, TrainerDeployment
from serve_app.serve_manifest import APPLICATION as APPLICATION
from serve_app.serve_manifest import ROUTER_OPTIONS, router_sizes

HEALTH = {"health_check_period_s": 1, "health_check_timeout_s": 10}
# A healthy trainer that computes only on idle cores may answer late.
TRAINER_HEALTH = {"health_check_period_s": 10, "health_check_timeout_s": 120}
POOL_SHUTDOWN = {"graceful_shutdown_wait_loop_s": 0.5, "graceful_shutdown_timeout_s": 10}
SHUTDOWN_S = POOL_SHUTDOWN["graceful_shutdown_timeout_s"]  # seconds for a drained target to end


def build(args: Mapping[str, Any]) -> serve.Application:
    """Builds the application from a configuration mapping. Raises ConfigError if it is invalid."""
    return application(validated(args))


def application(config: SlipstreamConfig) -> serve.Application:
    """Binds the deployments of routers, drafters and targets, and of the trainer if the draft learns."""
    target = serve.deployment(TargetDeployment, name="Target").options(
        **target_group_options(config.target),
        autoscaling_config=_scaling(config.target.replicas),
        user_config=scaling_settings(config.target, config.draft),
        **HEALTH,
        **_logging(config.server),
        **(POOL_SHUTDOWN | {"graceful_shutdown_timeout_s": config.target.drain_s + SHUTDOWN_S}),
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
        # Retry a full router quickly, since it may soon have room again.
        request_router_config={"max_backoff_s": 0.05},
        ray_actor_options=dict(ROUTER_OPTIONS),
        max_surge_percent=100,  # during an update, new replicas serve before old ones end
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1,
        **_logging(config.server),
    )
    targets = target.bind(config)
    pools = targets, drafter.bind(config, targets)
    learning = config.draft.learning
    return router.bind(config, *pools, *([] if learning is None else [_trainer(config, learning)]))


def _trainer(config: SlipstreamConfig, learning: LearningOptions) -> serve.Application:
    trainer = serve.deployment(TrainerDeployment, name="Trainer").options(
        num_replicas=1,
        ray_actor_options=actor_options(learning.resources),
        **TRAINER_HEALTH,
        **_logging(config.server),
        **POOL_SHUTDOWN,
    )
    return trainer.bind(config)


def _scaling(replicas: Replicas) -> dict[str, Any]:
    return {**bounds(replicas), "policy": dict(ALONE_POLICY)}


def _logging(server: ServerConfig) -> dict[str, Any]:
    """Returns Serve's logging options; empty for text logs, which use Serve's defaults."""
    return {} if server.log_format == "text" else {"logging_config": {"encoding": "JSON"}}
