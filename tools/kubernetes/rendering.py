"""`slipstream k8s`: renders all manifests of one deployment from its configuration.

All pods read the weights from one volume, which a job fills.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from importlib.resources import as_file, files
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
import yaml

from cluster.config import DraftPool, SlipstreamConfig
from cluster.config_sections import PodOptions
from cluster.errors import ConfigError
from cluster.placement import pools, resources_key, resources_of
from serve_app.operations.checks import is_guarded, missing_keys
from tools.kubernetes.ray_service import (
    CLAIM,
    HOME,
    HTTP_PORT,
    MODELS,
    NAME,
    TOKEN_SECRET,
    WRITABLE_FOLDERS,
    Json,
    container,
    disruption_budgets,
    group_name,
    image_access,
    ray_service,
    template,
)

DOWNLOADER = PodOptions(cpu="2", memory="8Gi")
WHOLE_MODEL = "--exclude 'original/*'"  # a second copy of the weights in another format
TOKENIZER_ONLY = f"--include '*.json' --include '*.jinja' --include '*.model' --include '*.txt' {WHOLE_MODEL}"


def weights_volume(config: SlipstreamConfig, image: str) -> list[Json]:
    """Returns the volume claim of the weights, and the download job if any model must be downloaded."""
    options = config.kubernetes.volume
    spec: Json = {"accessModes": [options.access], "resources": {"requests": {"storage": options.size}}}
    if options.storage_class is not None:
        spec["storageClassName"] = options.storage_class
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": spec}
    options_of = downloads(config)
    return [claim, _job(options_of, image, image_access(config))] if options_of else [claim]


def downloads(config: SlipstreamConfig) -> dict[str, str]:
    """Returns the options of `hf download` for each Hugging Face id; models given by path are already on the volume."""
    parts = [one.config for one in config.served]
    models = [name for one in parts for name in (one.model.target, one.draft.model, *one.target.adapters.values())]
    tokenizers = [one.draft.tokenizer for one in parts]
    options_of = dict.fromkeys(tokenizers, TOKENIZER_ONLY) | dict.fromkeys(models, WHOLE_MODEL)
    return {
        name: options_of[name]
        for name in dict.fromkeys((*models, *tokenizers))
        if name is not None and not PurePosixPath(name).is_absolute()
    }


def _job(options_of: Mapping[str, str], image: str, access: Json) -> Json:
    main = container("download", image, DOWNLOADER, {}, {"HF_HOME": MODELS})
    # All pods must load the same commit, so a complete model is not updated: offline, `hf` then succeeds.
    script = "".join(
        f"HF_HUB_OFFLINE=1 hf download {name} {options} ||\n  hf download {name} {options}\n"
        for name, options in options_of.items()
    )
    main |= {"command": ["/bin/sh", "-ec"], "args": [script]}
    # Only gated models need a token.
    token = {"name": "hugging-face", "key": "token", "optional": True}
    main["env"].append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}})
    main["volumeMounts"].append({"name": "models", "mountPath": MODELS})
    weights = {"name": "models", "persistentVolumeClaim": {"claimName": CLAIM}}
    more = {**access, "restartPolicy": "OnFailure", "automountServiceAccountToken": False}
    pod = template(main, DOWNLOADER, [weights], **more)
    labels = {"app.kubernetes.io/name": f"{NAME}-models"}
    pod["metadata"]["labels"] = labels
    # Kubernetes does not allow changes to a job, so its name depends on the image and the models.
    digest = hashlib.sha256(json.dumps(pod).encode()).hexdigest()[:8]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{CLAIM}-{digest}", "labels": labels},
        "spec": {"backoffLimit": 3, "template": pod},
    }


k8s_app = typer.Typer(help="Deploy on Kubernetes.", no_args_is_help=True)


@k8s_app.callback()
def _group() -> None:
    """Keeps `render` a subcommand, since Typer would merge a group with its only command."""


@k8s_app.command()
def render(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key in the manifests.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Output folder; default: CONFIG's folder.")] = None,
) -> None:
    """Writes the manifests of CONFIG for `kubectl apply -k`."""
    from cluster.config import load_config

    config = load_config(config_path, overrides or (), os.environ)
    folder = out or config_path.parent
    names = render_into(config, config_path, folder)
    typer.echo(f"{', '.join(names)} are in {folder}")


OVERLAYS = Path("../..")  # path from an overlay of the repository to the shared manifests
SELF_CONTAINED = Path()  # path from a folder with a copy of the shared manifests
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
TOKEN_FILE = re.compile(r"/(?:[^/]+/)+[^/]+")
# Folders of the image; a secret mounted at one of them or above would hide its files.
SYSTEM_FOLDERS = "/bin /etc/ssl /lib /opt /proc /root /run /sbin /sys /usr/bin /usr/lib /usr/local /var/lib /var/run"


def render_into(config: SlipstreamConfig, source: Path, folder: Path) -> tuple[str, ...]:
    """Writes the manifests of `config` to `folder` and returns the file names.

    An overlay of the repository refers to its base and components. Any other folder receives copies of the required
    parts from the installed package. `source` is the configuration's file, named in each file's first line. Raises
    ConfigError if a file would replace it.
    """
    is_overlay = (folder / OVERLAYS / "base" / "kustomization.yaml").is_file()
    texts = rendered(config, source.name, OVERLAYS if is_overlay else SELF_CONTAINED)
    if any((folder / name).resolve() == source.resolve() for name in texts):
        raise ConfigError(f"{source} would be overwritten by the manifest {source.name}; rename it, or set --out")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    if is_overlay:
        return tuple(texts)
    parts = ["base", *[f"components/{name}" for name in config.kubernetes.components]]
    with as_file(files("k8s")) as manifests:
        for part in parts:
            shutil.copytree(manifests / part, folder / part, dirs_exist_ok=True)
    return (*texts, *parts)


def rendered(config: SlipstreamConfig, source: str, shared: Path = OVERLAYS) -> Mapping[str, str]:
    """Returns the manifests by file name; `shared` is the relative path to base and components."""
    check(config)
    image = config.kubernetes.image
    assert image is not None, "checked"
    documents = {
        "models.yaml": weights_volume(config, image),
        "rayservice.yaml": [ray_service(config, image), *disruption_budgets(config)],
        "kustomization.yaml": [_kustomization(config, shared)],
    }
    return {name: _text(parts, source) for name, parts in documents.items()}


def check(config: SlipstreamConfig) -> None:
    """Raises ConfigError with one line per key that does not work on Kubernetes."""
    faults = [*_general_faults(config), *_pool_faults(config)]
    if faults:
        raise ConfigError("invalid configuration for Kubernetes\n  " + "\n  ".join(faults))


def _general_faults(config: SlipstreamConfig) -> Iterable[str]:
    if config.kubernetes.image is None:
        yield "kubernetes.image is missing; set it to the image built from k8s/images/Dockerfile"
    if config.trust.is_off:
        yield (
            "trust has neither certificates nor a token_file, but pods communicate over the network; set one, or"
            " trust.insecure: true"
        )
    names = [group_name(section) for section in pools(config)]
    if unknown := [name for name in config.kubernetes.pools if name not in names]:
        yield f"kubernetes.pools has {', '.join(unknown)}, expected names of pools: {', '.join(names)}"
    folder = config.trust.certificates
    if folder is not None and (not folder.startswith("/") or "{role}" not in folder):
        yield (
            f"trust.certificates is {folder}, expected an absolute path with {{role}}, where each pod mounts the secret"
            " of its own role; use /etc/slipstream/{role}"
        )
    token_file = config.trust.token_file
    if token_file is not None and not _has_own_folder(token_file):
        yield (
            f"trust.token_file is {token_file}, expected an absolute path in a folder of its own, where each pod mounts"
            f" the secret {TOKEN_SECRET}; use /etc/slipstream/token/tokens"
        )
    if not is_guarded(config.server):
        yield f"pods are reachable over the network, and {missing_keys()}"
    if any(one.config.draft.learning is not None for one in config.served):
        yield (
            "a draft has the section learning, but pods have no writable volume for its examples and versions; leave it"
            " out, and train drafts outside the cluster"
        )
    for key, name in _checkpoints(config):
        path = PurePosixPath(name)
        if path.is_absolute() and not path.is_relative_to(MODELS):
            yield (
                f"{key} is {name}, but pods mount only the volume at {MODELS}; use a Hugging Face id, or copy the"
                f" folder to the volume and use {MODELS}/{path.name}"
            )
    records = config.server.audit.records
    if records is not None and not any((PurePosixPath(HOME) / records).is_relative_to(one) for one in WRITABLE_FOLDERS):
        yield (
            f"server.audit.records is {records}, but pods can write only to {', '.join(WRITABLE_FOLDERS)}; leave it out"
            " and use the routers' logs"
        )
    if config.server.port != HTTP_PORT:
        yield f"server.port is {config.server.port}, expected {HTTP_PORT}, the port of KubeRay's probes; leave it out"


def _has_own_folder(token_file: str) -> bool:
    """Returns whether pods can mount a secret as the file's folder, without hiding another mount or file."""
    if not TOKEN_FILE.fullmatch(token_file):
        return False
    folder = PurePosixPath(token_file).parent
    others = (MODELS, *WRITABLE_FOLDERS, *SYSTEM_FOLDERS.split())
    hides = any(PurePosixPath(path).is_relative_to(folder) for path in others)
    return not hides and not folder.is_relative_to(MODELS)  # in the read-only volume, nothing can be mounted


def _checkpoints(config: SlipstreamConfig) -> Iterable[tuple[str, str]]:
    """Yields the configuration key of each checkpoint, with its Hugging Face id or folder."""
    models = {f"models.{name}.": (one.model, one.target) for name, one in config.models.items()}
    for prefix, (model, target) in (models or {"": (config.model, config.target)}).items():
        yield f"{prefix}model.target", model.target
        for name, adapter in target.adapters.items():
            yield f"{prefix}target.adapters.{name}", adapter
    for section, pool in pools(config).items():
        if isinstance(pool, DraftPool):
            for key, checkpoint in (("model", pool.model), ("tokenizer", pool.tokenizer)):
                if checkpoint is not None:
                    yield f"{section}.{key}", checkpoint


def _pool_faults(config: SlipstreamConfig) -> Iterable[str]:
    """Finds requirements that KubeRay's autoscaler ignores; it only considers a group's CPUs, GPUs and labels."""
    for name, pool in pools(config).items():
        section, resources = f"{name}.{resources_key(pool)}", resources_of(pool)
        if resources.accelerator_type is not None:
            yield (
                f"{section}.accelerator_type is {resources.accelerator_type}, which Ray's autoscaler ignores;"
                f" use {section}.labels: {{ray.io/accelerator-type: {resources.accelerator_type}}}"
                " and the node_selector of the pool's pods below kubernetes"
            )
        if resources.custom:
            yield (
                f"{section}.custom has {', '.join(resources.custom)}, which Ray's autoscaler ignores;"
                f" use {section}.labels"
            )
        if expressions := [text for text in resources.labels.values() if not LABEL_VALUE.fullmatch(text)]:
            yield (
                f"{section}.labels has {', '.join(expressions)}, but these labels are also set on nodes, which"
                " accept only plain values; choose one value"
            )
        if "pool" in resources.labels:
            yield f"{section}.labels has a label pool, which the manifests set for each pool; leave it out"


def _kustomization(config: SlipstreamConfig, shared: Path) -> Json:
    made: Json = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [(shared / "base").as_posix(), "models.yaml", "rayservice.yaml"],
    }
    if config.kubernetes.components:
        made["components"] = [(shared / "components" / name).as_posix() for name in config.kubernetes.components]
    return made


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as blocks, and repeated values in full instead of as aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _text(documents: Iterable[Json], source: str) -> str:
    head = f"# Written by `slipstream k8s render {source}`. Change the configuration, not this file.\n"
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
