"""Renders the RayService: Serve application, head, worker groups for targets, drafters and routers. Pure.

Pods are unprivileged: no root user, a read-only root file system, and read-only weights. Each pool's worker group takes
its GPUs, CPUs, bounds and timeouts from the configuration.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from cluster.config import DraftPool, Replicas, SlipstreamConfig, TargetPool, validated
from cluster.config_sections import PodOptions, TrustConfig
from cluster.placement import pools, replica_resources, resources_key, resources_of
from cluster.trust import PeerRole
from serve_app.api.proxy_errors import PROXY_ENVIRONMENT
from serve_app.operations.node_drain import RAY_DRAIN, drain_s
from serve_app.serve_manifest import application, serve_file

ROUTER_CPUS = 1
POOL_LABEL = "pool"  # node label; pins a pool's replicas to the worker group of the same name
RAY_ENDS_S = 30  # seconds for Ray's processes to exit after the drain
SPARE = 2  # maximum size of a scaling group, as a multiple of its pool's maximum


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Worker group with enough pods of one kind for a pool's replicas."""

    name: str
    role: PeerRole
    pods: PodOptions
    cpus: int  # CPUs that one pod offers to Ray
    gpus: int
    least: int  # minimum number of pods
    most: int
    labels: dict[str, str]  # labels of the group's Ray nodes
    idle_s: int | None = None
    is_spread: bool = False  # whether to spread over nodes if possible


def worker_groups(config: SlipstreamConfig) -> tuple[WorkerGroup, ...]:
    """Returns the worker groups of targets, drafters and routers."""
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
    return (*(_pool_group(section, pool, config) for section, pool in pools(config).items()), routers)


def pool_labels(section: str, pool: TargetPool | DraftPool) -> dict[str, str]:
    """Returns the node labels required by a pool's replicas and set by its worker group."""
    return {**resources_of(pool).labels, POOL_LABEL: group_name(section)}


def group_name(section: str) -> str:
    """Returns the name of a pool's worker group, such as `target`, `target-small` or `draft-fast`."""
    match section.split("."):
        case ["models", name, kind]:
            return f"{kind}-{name}"
        case ["drafts", name]:
            return f"draft-{name}"
    return section


def scales(config: SlipstreamConfig) -> bool:
    """Returns whether any pool scales, which requires Ray's autoscaler."""
    return any(pool.replicas.min < pool.replicas.max for pool in pools(config).values())


def grace_s(config: SlipstreamConfig) -> int:
    """Returns the termination grace period of a pod, in seconds."""
    return drain_s(config) + RAY_ENDS_S


def _pool_group(section: str, pool: TargetPool | DraftPool, config: SlipstreamConfig) -> WorkerGroup:
    name = group_name(section)
    options = config.kubernetes
    if isinstance(pool, DraftPool):
        role, default, processes = PeerRole.DRAFTER, options.draft, 1
    else:
        role, default, processes = PeerRole.TARGET, options.target, pool.tensor_parallel
    pods = options.pools.get(name, default)
    return WorkerGroup(
        name,
        role,
        pods,
        cpus=math.ceil(pods.replicas * replica_resources(pool).get("CPU", 0)),
        gpus=_gpus_for(pods.replicas * processes, resources_of(pool).num_gpus),
        least=_pods_for(pool.replicas.min, pods.replicas),
        most=_max_pods(pool.replicas, pods.replicas),
        labels=pool_labels(section, pool),
        idle_s=pods.idle_s,
    )


def _gpus_for(processes: int, share: float) -> int:
    """Returns the GPUs needed by processes that use `share` GPUs each; a share below 1 must fit on one GPU."""
    if 0 < share < 1:
        return math.ceil(processes / math.floor(1 / share))
    return math.ceil(processes * share)


def _pods_for(replicas: int, per_pod: int) -> int:
    return -(-replicas // per_pod)


def _max_pods(replicas: Replicas, per_pod: int) -> int:
    """Returns the maximum number of pods.

    For a scaling pool, it leaves room to raise `replicas.max` in a running cluster, where KubeRay does not apply
    changes to this maximum.
    """
    most = _pods_for(replicas.max, per_pod)
    return most if replicas.min == replicas.max else SPARE * most


Json = dict[str, Any]

NAME = "slipstream"
LABELS = {"app.kubernetes.io/name": NAME}
USER = 1000  # user id in k8s/images/Dockerfile
HOME = "/home/slipstream"
MODELS = "/models"
CLAIM = "slipstream-models"
GPU = "nvidia.com/gpu"

UNPRIVILEGED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Writable folders for Ray's logs and sockets, and for caches of kernel compilers.
WRITABLE = ({"name": "scratch", "mountPath": "/tmp"}, {"name": "home", "mountPath": HOME})
WRITABLE_VOLUMES = (
    {"name": "scratch", "emptyDir": {"sizeLimit": "10Gi"}},
    {"name": "home", "emptyDir": {"sizeLimit": "5Gi"}},
)
SHARED_MEMORY = {"name": "shared-memory", "mountPath": "/dev/shm"}
WRITABLE_FOLDERS = tuple(mount["mountPath"] for mount in (*WRITABLE, SHARED_MEMORY))


def security_context() -> Json:
    """Returns the security context of a pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # Changing the owner of all weight files at each start would take minutes.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container(
    name: str, image: str, pods: PodOptions, ports: Mapping[str, int], env: Mapping[str, str], gpus: int = 0
) -> Json:
    """Returns the Ray container of a pod, with limits on memory and GPUs but not on CPU."""
    gpu = {GPU: str(gpus)} if gpus else {}
    made: Json = {
        "name": name,
        "image": image,
        "securityContext": dict(UNPRIVILEGED),
        "resources": {
            "requests": {"cpu": pods.cpu, "memory": pods.memory, **gpu},
            "limits": {"memory": pods.memory, **gpu},
        },
        "volumeMounts": [*WRITABLE, SHARED_MEMORY],
    }
    if ports:
        made["ports"] = [{"name": port, "containerPort": number} for port, number in ports.items()]
    if env:
        made["env"] = [{"name": variable, "value": value} for variable, value in env.items()]
    return made


def template(main: Json, pods: PodOptions, volumes: Sequence[Json], **more: Any) -> Json:
    """Returns a pod that runs `main` on nodes selected by `pods`; `more` adds keys to its specification."""
    shared_memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}}
    placing: Json = {}
    if pods.node_selector:
        placing["nodeSelector"] = dict(pods.node_selector)
    taints = [*([GPU] if GPU in main["resources"]["limits"] else []), *pods.tolerations]
    if taints:
        placing["tolerations"] = [{"key": key, "operator": "Exists"} for key in taints]
    return {
        "metadata": {"labels": dict(LABELS)},
        "spec": {
            **more,
            "securityContext": security_context(),
            **placing,
            "containers": [main],
            "volumes": [*WRITABLE_VOLUMES, shared_memory, *volumes],
        },
    }


def image_access(config: SlipstreamConfig) -> Json:
    """Returns the keys that let a pod's specification use a private registry."""
    secrets = [{"name": name} for name in config.kubernetes.image_pull_secrets]
    return {"imagePullSecrets": secrets} if secrets else {}


RAY_VERSION = "2.60.0"  # Ray's version in the image
HTTP_PORT = 8000  # port of Serve's proxy, used by KubeRay's probes
WORKER_PORTS = {"serve": HTTP_PORT, "metrics": 8080}
# A router's pod receives traffic while the router is ready and Serve's proxy is healthy. As in KubeRay's own probe, the
# proxy of a draining node is unhealthy. A busy machine may miss a probe. Clients wait while no target is available.
READINESS = {
    "exec": {
        "command": [
            "bash",
            "-c",
            f"wget --tries 1 -T 2 -q -O- http://localhost:{HTTP_PORT}/-/healthz | grep success"
            f" && wget --tries 1 -T 4 -q -O- http://localhost:{HTTP_PORT}/health/ready | grep ok",
        ]
    },
    "periodSeconds": 5,
    "timeoutSeconds": 8,
    "failureThreshold": 3,
}
HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, **WORKER_PORTS, "as-metrics": 44217, "dash-metrics": 44227}
TOKEN_SECRET = f"{NAME}-token"  # its key is the file name of trust.token_file
OBJECT_STORE_BYTES = 1 << 28  # small, since no large objects pass through the store


def ray_service(config: SlipstreamConfig, image: str) -> Json:
    """Returns KubeRay's custom resource for a Ray cluster with a Serve application."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {
            "name": NAME,
            # A starting pool may wait for a new node, a large image and more than a hundred gigabytes of weights.
            "annotations": {"ray.io/initializing-timeout": "60m"},
        },
        "spec": {
            # By default, a change below rayClusterConfig starts a second cluster, which doubles the GPUs.
            "upgradeStrategy": {"type": "None"},
            "rayClusterDeletionDelaySeconds": 600,
            # The loss of the head would break all streams through its proxy.
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": yaml.safe_dump(serve_config(config), sort_keys=False, width=120),
            "rayClusterConfig": _cluster(config, image),
        },
    }


def disruption_budgets(config: SlipstreamConfig) -> Iterable[Json]:
    """Yields a budget for each of several target pools; the component has those of a single model."""
    if not config.models or "disruption-budget" not in config.kubernetes.components:
        return
    for group in worker_groups(config):
        if group.role is PeerRole.TARGET:
            yield {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": f"{NAME}-{group.name}"},
                "spec": {"minAvailable": 1, "selector": {"matchLabels": {**LABELS, "ray.io/group": group.name}}},
            }


def serve_config(config: SlipstreamConfig) -> Json:
    """Returns the input of `serve deploy`. Routers avoid GPU pods, which they would keep from scaling down.

    A pod has room for one router, so an update stops each router before starting its successor.
    """
    options = {"num_cpus": ROUTER_CPUS, "label_selector": {POOL_LABEL: "router"}}
    router = {"ray_actor_options": options, "max_surge_percent": 0}
    serve_application = application(in_pods(config), NAME, more={"Router": router})
    return serve_file([serve_application], {"keep_alive_timeout_s": config.server.keep_alive_s})


def in_pods(config: SlipstreamConfig) -> SlipstreamConfig:
    """Returns the configuration for pods: adds each pool's labels, and removes keys that do not apply."""
    given = config.given(kubernetes=True, server={"host", "port"})
    for section, pool in pools(config).items():
        part = given
        for key in (*section.split("."), resources_key(pool)):
            part = part.setdefault(key, {})
        part["labels"] = pool_labels(section, pool)
    return validated(given)


def _cluster(config: SlipstreamConfig, image: str) -> Json:
    groups = [_worker_group(group, config, image) for group in worker_groups(config)]
    return {
        "rayVersion": RAY_VERSION,
        # Ray's own ports require a token; KubeRay creates the secret and mounts it in every pod.
        "authOptions": {"mode": "token"},
        **(_autoscaler() if scales(config) else {}),
        "headGroupSpec": _head(config, image),
        "workerGroupSpecs": groups,
    }


def _autoscaler() -> Json:
    options = {
        "version": "v2",  # supports label selectors
        "securityContext": dict(UNPRIVILEGED),
        "volumeMounts": list(WRITABLE),
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    }
    return {"enableInTreeAutoscaling": True, "autoscalerOptions": options}


def _head(config: SlipstreamConfig, image: str) -> Json:
    pods = config.kubernetes.head
    env = {
        RAY_DRAIN: "0",  # no replicas to drain; Ray's default of 30 s would use up the grace period
        **PROXY_ENVIRONMENT,
    }
    return {
        # Run no replica on the head, so that losing it ends no session.
        "rayStartParams": {"num-cpus": "0", "object-store-memory": str(OBJECT_STORE_BYTES)},
        "template": template(container("ray-head", image, pods, HEAD_PORTS, env), pods, [], **image_access(config)),
    }


def _worker_group(group: WorkerGroup, config: SlipstreamConfig, image: str) -> Json:
    env = {
        "HF_HOME": MODELS,
        # The volume holds the weights; a replica fails immediately if a file is missing, instead of downloading it.
        "HF_HUB_OFFLINE": "1",
        RAY_DRAIN: str(drain_s(config)),
        **PROXY_ENVIRONMENT,
    }
    main = container("ray-worker", image, group.pods, WORKER_PORTS, env, group.gpus)
    if group.role is PeerRole.ROUTER:
        main["readinessProbe"] = READINESS
    main["volumeMounts"].append({"name": "models", "mountPath": MODELS, "readOnly": True})
    volumes: list[Json] = [{"name": "models", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}]
    for folder, secret in _trust_secrets(config.trust, group.role):
        main["volumeMounts"].append({"name": secret, "mountPath": folder, "readOnly": True})
        volumes.append({"name": secret, "secret": {"secretName": secret, "defaultMode": 0o440}})
    more: dict[str, Any] = {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": grace_s(config)}
    if group.is_spread:
        more["topologySpreadConstraints"] = [_over_nodes(group.name)]
    made = {
        "groupName": group.name,
        "labels": dict(group.labels),
        "replicas": group.least,
        "minReplicas": group.least,
        "maxReplicas": group.most,
        "rayStartParams": {"num-cpus": str(group.cpus), "object-store-memory": str(OBJECT_STORE_BYTES)},
        "template": template(main, group.pods, volumes, **image_access(config), **more),
    }
    if scales(config) and group.idle_s is not None:
        made["idleTimeoutSeconds"] = group.idle_s
    return made


def _trust_secrets(trust: TrustConfig, role: PeerRole) -> Iterable[tuple[str, str]]:
    """Yields the folder and name of each secret that authenticates a pod.

    Secrets are mounted as folders, because the kubelet does not update single-file mounts.
    """
    if trust.certificates is not None:
        yield trust.certificates.replace("{role}", role.value), f"{NAME}-{role.value}"
    if trust.token_file is not None:
        yield str(PurePosixPath(trust.token_file).parent), TOKEN_SECRET


def _over_nodes(group: str) -> Json:
    """Spreads routers over nodes, since losing a node ends all of its routers."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": NAME, "ray.io/group": group}},
    }
