"""The Serve application: turns one configuration into bound deployments.

`serve deploy`, KubeRay and the command line all use `build`, with the per-deployment parts from `serve_manifest`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve

from cluster.config import LearningOptions, Replicas, ServedModel, ServerConfig, SlipstreamConfig, validated
from cluster.placement import ALONE_POLICY, actor_options, autoscaling_config, scaling_settings, target_group_options
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
    """Binds the deployments of routers, drafters and targets, and of a trainer for each draft that learns."""
    targets = {one.target: _target(one) for one in config.served}
    pools = dict(targets)
    for name, models in config.pools.items():
        verifiers = {one.name: targets[one.target] for one in config.served if one.drafter == name}
        pools[name] = _drafter(name, models, verifiers)
    for one in config.served:
        if (learning := one.config.draft.learning) is not None:
            pools[one.trainer] = _trainer(one, learning)
    router = serve.deployment(RouterDeployment, name="Router").options(
        **router_sizes(config),
        backpressure_config={"status_code": 429, "retry_after_s": RETRY_AFTER_S},
        # Retry a full router quickly, since it may soon have room again.
        request_router_config={"max_backoff_s": 0.05},
        ray_actor_options=dict(ROUTER_OPTIONS),
        max_surge_percent=100,  # during an update, new replicas serve before old ones end
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1,
        **_logging(config.server),
    )
    return router.bind(config, pools)


def _target(served: ServedModel) -> serve.Application:
    pool = served.config.target
    target = serve.deployment(TargetDeployment, name=served.target).options(
        **target_group_options(pool),
        autoscaling_config=_scaling(pool.replicas),
        user_config=scaling_settings(served),
        **HEALTH,
        **_logging(served.config.server),
        **(POOL_SHUTDOWN | {"graceful_shutdown_timeout_s": pool.drain_s + SHUTDOWN_S}),
    )
    return target.bind(served.config)


def _drafter(
    name: str, models: Sequence[SlipstreamConfig], targets: Mapping[str, serve.Application]
) -> serve.Application:
    draft = models[0].draft
    drafter = serve.deployment(DraftDeployment, name=name).options(
        ray_actor_options=actor_options(draft.resources),
        autoscaling_config=_scaling(draft.replicas),
        **HEALTH,
        **_logging(models[0].server),
        **POOL_SHUTDOWN,
    )
    return drafter.bind(models, targets)


def _trainer(served: ServedModel, learning: LearningOptions) -> serve.Application:
    trainer = serve.deployment(TrainerDeployment, name=served.trainer).options(
        num_replicas=1,
        ray_actor_options=actor_options(learning.resources),
        **TRAINER_HEALTH,
        **_logging(served.config.server),
        **POOL_SHUTDOWN,
    )
    return trainer.bind(served.config)


def _scaling(replicas: Replicas) -> dict[str, Any]:
    return {**autoscaling_config(replicas), "policy": dict(ALONE_POLICY)}


def _logging(server: ServerConfig) -> dict[str, Any]:
    """Returns Serve's logging options; empty for text logs, which use Serve's defaults."""
    return {} if server.log_format == "text" else {"logging_config": {"encoding": "JSON"}}
