"""Translates resources in the config into the options of Ray and Ray Serve.

Pure translation.
"""

from dataclasses import asdict
from typing import Any

from cluster.autoscaling.needs import ROOM, DraftScaling, TargetScaling
from cluster.autoscaling.serve_policy import DRAFT, TARGET
from cluster.config import DraftPool, Replicas, Resources, TargetPool

AUTOSCALING_POLICY = {"policy_function": "cluster.autoscaling:PoolsPolicy"}  # of the application, which sees both pools
REPORT_S = 2.0  # between two reports of a replica; Serve's default would be ten
LOOK_BACK_S = 10.0  # over which the policy sees their means: a session that has yet to find its drafter is none
COORDINATOR_CPUS = 0.1  # a target's coordinator moves messages; its ranks do the work


def actor_options(resources: Resources) -> dict[str, Any]:
    """Options for a Ray actor that runs a model."""
    options: dict[str, Any] = {"num_cpus": resources.num_cpus, "num_gpus": resources.num_gpus}
    if resources.accelerator_type is not None:
        options["accelerator_type"] = resources.accelerator_type
    if resources.custom:
        options["resources"] = dict(resources.custom)
    if resources.labels:
        options["label_selector"] = dict(resources.labels)
    return options


def rank_bundle(resources: Resources) -> dict[str, float]:
    """The placement-group bundle of one tensor-parallel rank."""
    bundle = {"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom}
    if resources.accelerator_type is not None:
        bundle[f"accelerator_type:{resources.accelerator_type}"] = 0.001
    return {name: amount for name, amount in bundle.items() if amount > 0}


def target_group_options(pool: TargetPool) -> dict[str, Any]:
    """Serve options of a target replica: one group on one node, the coordinator beside rank 0."""
    bundles = [rank_bundle(pool.resources_per_rank) for _ in range(pool.tensor_parallel)]
    bundles[0]["CPU"] = bundles[0].get("CPU", 0) + COORDINATOR_CPUS
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": COORDINATOR_CPUS},
        "placement_group_bundles": bundles,
        "placement_group_strategy": "STRICT_PACK",
    }
    if pool.resources_per_rank.labels:
        options["placement_group_bundle_label_selector"] = [dict(pool.resources_per_rank.labels)]
    return options


def target_scaling_options(pool: TargetPool) -> dict[str, Any]:
    """Serve options for the target pool's size."""
    scaling = TargetScaling(
        sessions_per_replica=_sessions_aimed_at(pool.replicas, pool.max_sessions),
        max_sessions=pool.max_sessions,
        first_token_s=pool.replicas.first_token_s,
        up_delay_s=pool.replicas.up_delay_s,
        down_delay_s=pool.replicas.down_delay_s,
    )
    return _scaling_options(pool.replicas, {TARGET: asdict(scaling)})


def draft_scaling_options(pool: DraftPool) -> dict[str, Any]:
    """Serve options for the draft pool's size."""
    scaling = DraftScaling(
        sessions_per_replica=_sessions_aimed_at(pool.replicas, pool.max_sessions),
        per_target=pool.replicas.per_target,
        up_delay_s=pool.replicas.up_delay_s,
        down_delay_s=pool.replicas.down_delay_s,
    )
    return _scaling_options(pool.replicas, {DRAFT: asdict(scaling)})


def _sessions_aimed_at(replicas: Replicas, max_sessions: int) -> float:
    return replicas.sessions_per_replica or ROOM * max_sessions


def _scaling_options(replicas: Replicas, pool: dict[str, Any]) -> dict[str, Any]:
    """The same for a pool of fixed size, for what it reports is what the other one may scale by.

    Delays are the policy's, which follows sizes over them; Serve would follow the last one.
    """
    return {
        "autoscaling_config": {
            "min_replicas": replicas.min,
            "max_replicas": replicas.max,
            "metrics_interval_s": REPORT_S,
            "look_back_period_s": LOOK_BACK_S,
            "upscale_delay_s": 0,
            "downscale_delay_s": 0,
            "policy": {"policy_function": "cluster.autoscaling:PoolAlone", "policy_kwargs": pool},
        }
    }
