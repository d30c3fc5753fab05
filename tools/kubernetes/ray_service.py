"""The RayService: the Serve application, the head, and worker groups for targets, drafters and routers. Pure."""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import yaml

from cluster.config import SlipstreamConfig, validated
from cluster.trust.options import TrustConfig
from cluster.trust.roles import PeerRole
from serve_app.http.access.proxy_errors import PROXY_ENVIRONMENT
from serve_app.operations.draining import RAY_DRAIN, drain_s
from serve_app.serve_manifest import application, serve_file
from tools.kubernetes.pod_templates import (
    CLAIM,
    MODELS,
    NAME,
    UNPRIVILEGED,
    WRITABLE,
    Json,
    container,
    template,
)
from tools.kubernetes.pool_groups import (
    POOL_LABEL,
    ROUTER_CPUS,
    WorkerGroup,
    grace_s,
    pool_labels,
    scales,
    worker_groups,
)

RAY_VERSION = "2.60.0"  # version in the image
HTTP_PORT = 8000  # KubeRay's probes use Serve's proxy at this port
WORKER_PORTS = {"serve": HTTP_PORT, "metrics": 8080}
# A router's pod gets clients while its node does not drain, as KubeRay's own probe asks Serve's proxy, and while a
# request would be served. A busy machine may miss a probe; clients that come while no target is there wait for one.
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
TOKEN_SECRET = f"{NAME}-token"  # its key is the name of trust.token_file
OBJECT_STORE_BYTES = 1 << 28  # no large objects pass through the store


def ray_service(config: SlipstreamConfig, image: str) -> Json:
    """Returns the custom resource from which KubeRay makes a Ray cluster and a Serve application."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {
            "name": NAME,
            # Starting a pool may mean a new node, a large image and more than a hundred gigabytes of weights.
            "annotations": {"ray.io/initializing-timeout": "60m"},
        },
        "spec": {
            # Otherwise a change below rayClusterConfig would start a second cluster, doubling all GPUs.
            "upgradeStrategy": {"type": "None"},
            "rayClusterDeletionDelaySeconds": 600,
            # A stream through the head's proxy would end with the head.
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": yaml.safe_dump(serve_config(config), sort_keys=False, width=120),
            "rayClusterConfig": _cluster(config, image),
        },
    }


def serve_config(config: SlipstreamConfig) -> Json:
    """Returns the input of `serve deploy`. Routers are kept off the GPU pods, which could otherwise not scale down.

    A pod has room for one router, so an update stops each router before it starts the next.
    """
    options = {"num_cpus": ROUTER_CPUS, "label_selector": {POOL_LABEL: "router"}}
    router = {"ray_actor_options": options, "max_surge_percent": 0}
    ours = application(in_pods(config), NAME, more={"Router": router})
    return serve_file([ours], {"keep_alive_timeout_s": config.server.keep_alive_s})


def in_pods(config: SlipstreamConfig) -> SlipstreamConfig:
    """Returns the configuration for the application: without keys that are useless in a pod, with each pool's label."""
    given: Json = config.model_dump(
        mode="json", exclude_defaults=True, exclude={"kubernetes": True, "server": {"host", "port"}}
    )
    for pool, resources in (("target", "resources_per_rank"), ("draft", "resources")):
        given.setdefault(pool, {}).setdefault(resources, {})["labels"] = pool_labels(pool, config)
    return validated(given)


def _cluster(config: SlipstreamConfig, image: str) -> Json:
    groups = [_worker_group(group, config, image) for group in worker_groups(config)]
    return {
        "rayVersion": RAY_VERSION,
        # Token authentication on Ray's own ports; KubeRay creates the secret and mounts it in every pod.
        "authOptions": {"mode": "token"},
        **(_autoscaler() if scales(config) else {}),
        "headGroupSpec": _head(config, image),
        "workerGroupSpecs": groups,
    }


def _autoscaler() -> Json:
    options = {
        "version": "v2",  # supports labels
        "securityContext": dict(UNPRIVILEGED),
        "volumeMounts": list(WRITABLE),
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    }
    return {"enableInTreeAutoscaling": True, "autoscalerOptions": options}


def _head(config: SlipstreamConfig, image: str) -> Json:
    pods = config.kubernetes.head
    env = {
        RAY_DRAIN: "0",  # nothing runs there that could finish, and Ray's 30 s would use up the grace period
        **PROXY_ENVIRONMENT,
    }
    return {
        # No replica runs on the head: its loss must not end a session.
        "rayStartParams": {"num-cpus": "0"},
        "template": template(container("ray-head", image, pods, HEAD_PORTS, env), pods, []),
    }


def _worker_group(group: WorkerGroup, config: SlipstreamConfig, image: str) -> Json:
    env = {
        "HF_HOME": MODELS,
        # The weights are on the volume; a replica that misses a file fails at once instead of downloading it.
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
        "template": template(main, group.pods, volumes, **more),
    }
    if scales(config) and group.idle_s is not None:
        made["idleTimeoutSeconds"] = group.idle_s
    return made


def _trust_secrets(trust: TrustConfig, role: PeerRole) -> Iterable[tuple[str, str]]:
    """Yields folder and name of each secret that authenticates a pod.

    Secrets are mounted as whole folders, because the kubelet does not update single-file mounts.
    """
    if trust.certificates is not None:
        yield trust.certificates.replace("{role}", role.value), f"{NAME}-{role.value}"
    if trust.token_file is not None:
        yield str(PurePosixPath(trust.token_file).parent), TOKEN_SECRET


def _over_nodes(group: str) -> Json:
    """Spreads routers: two on one node would be lost together."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": NAME, "ray.io/group": group}},
    }
