"""Weights: one volume that all pods read, and the job that fills it. Pure."""

from pathlib import PurePosixPath

from cluster.config import SlipstreamConfig
from cluster.kubernetes_options import PodOptions
from tools.kubernetes.pod_templates import CLAIM, MODELS, NAME, Json, container, template

DOWNLOADER = PodOptions(cpu="2", memory="8Gi")


def weights_volume(config: SlipstreamConfig, image: str) -> list[Json]:
    """Returns the volume claim, and the download job if there is something to download."""
    options = config.kubernetes.volume
    spec: Json = {"accessModes": [options.access], "resources": {"requests": {"storage": options.size}}}
    if options.storage_class is not None:
        spec["storageClassName"] = options.storage_class
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": spec}
    names = downloads(config)
    return [claim, _job(names, image)] if names else [claim]


def downloads(config: SlipstreamConfig) -> list[str]:
    """Returns the models with a Hugging Face id; those with a path are on the volume already."""
    names = [config.model.target, *([config.draft.model] if config.draft.model else [])]
    return [name for name in dict.fromkeys(names) if not PurePosixPath(name).is_absolute()]


def _job(names: list[str], image: str) -> Json:
    main = container("download", image, DOWNLOADER, {}, {"HF_HOME": MODELS})
    # original/ holds a second copy of the weights in another format.
    script = "".join(f"hf download {name} --exclude 'original/*'\n" for name in names)
    main |= {"command": ["/bin/sh", "-ec"], "args": [script]}
    # Only gated models need a token.
    token = {"name": "hugging-face", "key": "token", "optional": True}
    main["env"].append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}})
    main["volumeMounts"].append({"name": "models", "mountPath": MODELS})
    weights = {"name": "models", "persistentVolumeClaim": {"claimName": CLAIM}}
    pod = template(main, DOWNLOADER, [weights], restartPolicy="OnFailure", automountServiceAccountToken=False)
    pod["metadata"]["labels"] = {"app.kubernetes.io/name": f"{NAME}-models"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": CLAIM},
        "spec": {"backoffLimit": 3, "template": pod},
    }
