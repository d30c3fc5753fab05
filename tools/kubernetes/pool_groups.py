"""Worker groups for the pools of a configuration: GPUs, CPUs, bounds and timeouts of each. Pure."""

import math
from collections import Counter
from dataclasses import dataclass

from cluster.config import DraftPool, Replicas, SlipstreamConfig, TargetPool
from cluster.kubernetes_options import PodOptions
from cluster.placement import rank_bundle, target_group_options
from cluster.trust.roles import PeerRole
from serve_app.operations.draining import drain_s

ROUTER_CPUS = 1
POOL_LABEL = "pool"  # label of Ray nodes: a pool's replicas run on the group with the pool's name
RAY_ENDS_S = 30  # time that Ray's processes take to exit after the drain
SPARE = 2  # upper bound of a scaling group, as a multiple of the pods that its pool may need


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Pods of one kind, as many as a pool's replicas need."""

    name: str
    role: PeerRole
    pods: PodOptions
    cpus: int  # CPUs that a pod offers to Ray
    gpus: int
    least: int  # pods
    most: int
    labels: dict[str, str]  # labels of the Ray nodes
    idle_s: int | None = None
    is_spread: bool = False  # spread over nodes if there are several


def worker_groups(config: SlipstreamConfig) -> tuple[WorkerGroup, ...]:
    """Returns the groups of targets, drafters and routers."""
    kubernetes = config.kubernetes
    routers = WorkerGroup(
        "router",
        PeerRole.ROUTER,
        kubernetes.router,
        cpus=ROUTER_CPUS,
        gpus=0,
        least=config.server.routers,
        most=config.server.routers,
        labels={POOL_LABEL: "router"},
        is_spread=True,
    )
    return (_pool_group("target", config), _pool_group("draft", config), routers)


def pool_labels(name: str, config: SlipstreamConfig) -> dict[str, str]:
    """Returns the labels that a pool's replicas require of their node, and that the pool's group therefore has."""
    given = config.target.resources_per_rank.labels if name == "target" else config.draft.resources.labels
    return {**given, POOL_LABEL: name}


def scales(config: SlipstreamConfig) -> bool:
    """Returns whether Ray's autoscaler is needed."""
    return any(pool.replicas.min < pool.replicas.max for pool in (config.target, config.draft))


def grace_s(config: SlipstreamConfig) -> int:
    """Returns how long Kubernetes lets a pod terminate, in seconds."""
    return drain_s(config) + RAY_ENDS_S


def _pool_group(name: str, config: SlipstreamConfig) -> WorkerGroup:
    pool: TargetPool | DraftPool = config.target if name == "target" else config.draft
    pods = config.kubernetes.target if name == "target" else config.kubernetes.draft
    reserved = _reserved(pool)
    least = _pods_for(pool.replicas.min, pods.replicas)
    return WorkerGroup(
        name,
        PeerRole.TARGET if name == "target" else PeerRole.DRAFTER,
        pods,
        cpus=math.ceil(pods.replicas * reserved["CPU"]),
        gpus=math.ceil(pods.replicas * reserved["GPU"]),
        least=least,
        most=_most_pods(pool.replicas, pods.replicas),
        labels=pool_labels(name, config),
        idle_s=pods.idle_s,
    )


def _reserved(pool: TargetPool | DraftPool) -> Counter[str]:
    """Returns what one replica reserves on its node."""
    if isinstance(pool, DraftPool):
        return Counter(rank_bundle(pool.resources))
    total: Counter[str] = Counter()
    for bundle in target_group_options(pool)["placement_group_bundles"]:
        total.update(bundle)
    return total


def _pods_for(replicas: int, a_pod: int) -> int:
    return -(-replicas // a_pod)


def _most_pods(replicas: Replicas, a_pod: int) -> int:
    """Returns the upper bound of pods.

    A scaling pool gets more than it needs: its own bound decides, and may be raised in a running cluster, whereas
    KubeRay does not apply a change of this one to a running cluster.
    """
    most = _pods_for(replicas.max, a_pod)
    return most if replicas.min == replicas.max else SPARE * most
