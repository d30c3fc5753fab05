"""Templates of unprivileged pods: no root user, a read-only root file system, and read-only weights. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.kubernetes_options import PodOptions

Json = dict[str, Any]

NAME = "slipstream"
LABELS = {"app.kubernetes.io/name": NAME}
USER = 1000  # as in k8s/images/Dockerfile
HOME = "/home/slipstream"
MODELS = "/models"
CLAIM = "slipstream-models"
GPU = "nvidia.com/gpu"

UNPRIVILEGED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Writable places: Ray's logs and sockets, and caches of kernel compilers.
WRITABLE = ({"name": "scratch", "mountPath": "/tmp"}, {"name": "home", "mountPath": HOME})
WRITABLE_VOLUMES = (
    {"name": "scratch", "emptyDir": {"sizeLimit": "10Gi"}},
    {"name": "home", "emptyDir": {"sizeLimit": "5Gi"}},
)
SHARED_MEMORY = {"name": "shared-memory", "mountPath": "/dev/shm"}


def security_context() -> Json:
    """Returns the security context of a pod."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # Changing the owner of every weight file at each start would take minutes.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container(
    name: str, image: str, pods: PodOptions, ports: Mapping[str, int], env: Mapping[str, str], gpus: int = 0
) -> Json:
    """Returns Ray's container of a pod. It gets the memory and GPUs that it requests, and any CPU that is free."""
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
    """Returns a pod that runs `main` on the nodes selected by `pods`; `more` goes into its specification."""
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
