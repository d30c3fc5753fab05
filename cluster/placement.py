"""Translates resources in the config into the options of Ray and Ray Serve.

Pure translation.
"""

from typing import Any

from cluster.config import Replicas, Resources, TargetPool

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


def scaling_options(replicas: Replicas) -> dict[str, Any]:
    """Serve options for a pool's size: fixed, or scaled between bounds by load."""
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.min}
    return {
        "autoscaling_config": {
            "min_replicas": replicas.min,
            "max_replicas": replicas.max,
            "policy": {
                "policy_function": "cluster.autoscaling:SessionsPolicy",
                "policy_kwargs": {"sessions_per_replica": replicas.sessions_per_replica},
            },
        }
    }
