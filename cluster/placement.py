"""Converts configured resources and replicas to options of Ray and Ray Serve. Pure."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from cluster.autoscaling import DEFAULT_UTILIZATION, DRAFTER, DraftScaling, TargetScaling
from cluster.config import DraftPool, Replicas, Resources, ServedModel, SlipstreamConfig, TargetPool

AUTOSCALING_POLICY = {
    "policy_function": "cluster.autoscaling:PoolsPolicy"
}  # application-level policy, which sees all pools
ALONE_POLICY = {"policy_function": "cluster.autoscaling:PoolAlone"}  # per-pool policy
REPORT_S = 2.0  # seconds between reports of a replica; Serve's default is 10
AVERAGING_WINDOW_S = 10.0  # averaging window of reports, in seconds; it smooths short gaps between drafters
COORDINATOR_CPUS = 0.1  # a target's coordinator only forwards messages; its ranks compute


def actor_options(resources: Resources) -> dict[str, Any]:
    """Returns the Ray options of an actor that runs a model."""
    options: dict[str, Any] = {"num_cpus": resources.num_cpus, "num_gpus": resources.num_gpus}
    if resources.accelerator_type is not None:
        options["accelerator_type"] = resources.accelerator_type
    if resources.custom:
        options["resources"] = dict(resources.custom)
    if resources.labels:
        options["label_selector"] = dict(resources.labels)
    return options


def rank_bundle(resources: Resources) -> dict[str, float]:
    """Returns the placement-group bundle of one tensor-parallel rank."""
    bundle = {"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom}
    if resources.accelerator_type is not None:
        bundle[f"accelerator_type:{resources.accelerator_type}"] = 0.001
    return {name: amount for name, amount in bundle.items() if amount > 0}


def target_group_options(pool: TargetPool) -> dict[str, Any]:
    """Returns the Serve options of a target replica: one placement group on one node; rank 0 shares the first bundle
    with the coordinator.
    """
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


def pools(config: SlipstreamConfig) -> dict[str, TargetPool | DraftPool]:
    """Returns all target pools, then all draft pools, by configuration section."""
    if not config.models:
        return {"target": config.target, "draft": config.draft}
    targets = {f"models.{name}.target": entry.target for name, entry in config.models.items()}
    named = {f"drafts.{name}": draft for name, draft in config.drafts.items()}
    return {**targets, **({"draft": config.draft} if DRAFTER in config.pools else {}), **named}


def resources_key(pool: TargetPool | DraftPool) -> str:
    """Returns the key of a pool's resources."""
    return "resources" if isinstance(pool, DraftPool) else "resources_per_rank"


def resources_of(pool: TargetPool | DraftPool) -> Resources:
    """Returns the resources of one process of a pool."""
    return pool.resources if isinstance(pool, DraftPool) else pool.resources_per_rank


def replica_resources(pool: TargetPool | DraftPool) -> dict[str, float]:
    """Returns the resources that one replica reserves on its node."""
    if isinstance(pool, DraftPool):
        return rank_bundle(pool.resources)
    total: Counter[str] = Counter()
    for bundle in target_group_options(pool)["placement_group_bundles"]:
        total.update(bundle)
    return dict(total)


def scaling_settings(served: ServedModel) -> dict[str, dict[str, float | None]]:
    """Returns the scaling settings of a model's pools, by deployment; target replicas report them to the policy."""
    target, draft = served.config.target, served.config.draft
    targets = TargetScaling(
        sessions_per_replica=_sessions_aimed_at(target.replicas, target.max_sessions),
        max_sessions=target.max_sessions,
        first_token_s=target.replicas.first_token_s,
        up_delay_s=target.replicas.up_delay_s,
        down_delay_s=target.replicas.down_delay_s,
    )
    drafters = DraftScaling(
        sessions_per_replica=_sessions_aimed_at(draft.replicas, draft.max_sessions),
        per_target=draft.replicas.per_target,
        up_delay_s=draft.replicas.up_delay_s,
        down_delay_s=draft.replicas.down_delay_s,
    )
    return {served.target: asdict(targets), served.drafter: asdict(drafters)}


def _sessions_aimed_at(replicas: Replicas, max_sessions: int) -> float:
    return replicas.sessions_per_replica or DEFAULT_UTILIZATION * max_sessions


def autoscaling_config(replicas: Replicas) -> dict[str, Any]:
    """Returns the Serve autoscaling configuration of a pool.

    A fixed-size pool needs one too, because the other pool may scale by its reports. Serve's own delays are 0, because
    the policy applies delays to the whole history of needed sizes.
    """
    return {
        "min_replicas": replicas.min,
        "max_replicas": replicas.max,
        "metrics_interval_s": REPORT_S,
        "look_back_period_s": AVERAGING_WINDOW_S,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
    }
