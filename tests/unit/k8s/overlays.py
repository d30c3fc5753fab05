"""Applied manifests: overlays merged with their base and components, and the other files of k8s/ as data.

Reimplements the few used features of kustomize; one test compares with kustomize itself, if installed.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from cluster.config import SlipstreamConfig, load_config, validated
from cluster.config_sections import TrustConfig
from serve_app.serve_manifest import with_own_part
from tools.kubernetes.rendering import rendered

Json = dict[str, Any]

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"
OVERLAYS = ("l4-h100", "local-cpu", "single-node")
COMPONENTS = ("certificates", "disruption-budget", "gcs-fault-tolerance", "monitoring")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load(path: Path) -> list[Json]:
    return list(yaml.load_all(path.read_text(), yaml.CSafeLoader))


def overlay_config(name: str) -> SlipstreamConfig:
    """Returns the configuration from which an overlay is rendered."""
    return load_config(K8S / "overlays" / name / "slipstream.yaml")


def merged(base: Any, patch: Any) -> Any:
    """Merges `patch` into `base` like kustomize: merges mappings key by key, and replaces other values."""
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return patch
    return base | {key: merged(base.get(key), value) for key, value in patch.items()}


def built(folder: Path, found: list[Json] | None = None) -> list[Json]:
    """Returns all objects of a folder with a kustomization, including those of referenced folders."""
    (kustomization,) = load(folder / "kustomization.yaml")
    objects = list(found or [])
    for name in kustomization.get("resources", []):
        path = folder / name
        objects += built(path) if path.is_dir() else load(path)
    objects += [_config_map(folder, made) for made in kustomization.get("configMapGenerator", [])]
    for patch in kustomization.get("patches", []):
        (change,) = load(folder / patch["path"])
        objects = [merged(each, change) if _address(each) == _address(change) else each for each in objects]
    for name in kustomization.get("components", []):
        objects = built(folder / name, objects)
    return objects


def _address(manifest: Json) -> tuple[str, str, str]:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


def _config_map(folder: Path, made: Json) -> Json:
    assert made["options"]["disableNameSuffixHash"], "a name with a hash would need more of kustomize than this"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": made["name"], "labels": made["options"]["labels"]},
        "data": {name: (folder / name).read_text() for name in made["files"]},
    }


def deployments() -> dict[str, list[Json]]:
    """Returns every overlay, and the largest overlay with each component, needed or not."""
    plain = {name: built(K8S / "overlays" / name) for name in OVERLAYS}
    more = {
        f"l4-h100-{component}": built(K8S / "components" / component, plain["l4-h100"])
        for component in COMPONENTS
        if component not in overlay_config("l4-h100").kubernetes.components
    }
    with_trust = {
        "l4-h100-with-certificates": TrustConfig(certificates="/etc/slipstream/{role}"),
        "l4-h100-with-a-token": TrustConfig(token_file="/etc/slipstream/token/tokens"),
    }
    return plain | more | {name: _with_trust(plain["l4-h100"], trust) for name, trust in with_trust.items()}


def _with_trust(objects: list[Json], trust: TrustConfig) -> list[Json]:
    """Returns the largest overlay, rendered with authenticated streams."""
    config = overlay_config("l4-h100").model_copy(update={"trust": trust})
    files = rendered(config, "slipstream.yaml")
    return [each for each in objects if each["kind"] != "RayService"] + [yaml.safe_load(files["rayservice.yaml"])]


def of_kind(objects: list[Json], kind: str) -> list[Json]:
    return [each for each in objects if each["kind"] == kind]


def ray_service_of(objects: list[Json]) -> Json:
    (service,) = of_kind(objects, "RayService")
    return service


def serve_config(service: Json) -> Json:
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert isinstance(config, dict)
    return config


def deployment_parts(service: Json) -> dict[str, Json]:
    """Returns the configuration parts that deployments receive besides the application's arguments."""
    (application,) = serve_config(service)["applications"]
    return {one["name"]: one for one in application["deployments"]}


def slipstream_config(service: Json) -> SlipstreamConfig:
    """Returns the application's configuration, with the settings of individual deployments."""
    (application,) = serve_config(service)["applications"]
    parts = deployment_parts(service)
    config = validated(application["args"])
    for name in ("Drafter", "Router"):
        config = with_own_part(config, parts[name]["ray_actor_options"]["runtime_env"]["env_vars"])
    data = config.model_dump(exclude_defaults=True)
    for pool, name in (("target", "Target"), ("draft", "Drafter")):
        scaled = parts[name]["autoscaling_config"]
        data[pool]["replicas"] = {"min": scaled["min_replicas"], "max": scaled["max_replicas"]}
    data.setdefault("server", {})["routers"] = parts["Router"]["num_replicas"]
    return validated(data)


def worker_group_specs(service: Json) -> list[Json]:
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert isinstance(groups, list)
    return groups


def pods(service: Json) -> list[tuple[dict[str, str], Json]]:
    """Yields each pod template's labels, including those added by KubeRay, and its spec."""
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    groups = [(head, "headgroup", "head")] + [
        (each, each["groupName"], "worker") for each in worker_group_specs(service)
    ]
    found = []
    for group, name, node_type in groups:
        added = {"ray.io/is-ray-node": "yes", "ray.io/node-type": node_type, "ray.io/group": name}
        found.append((group["template"]["metadata"]["labels"] | added, group["template"]["spec"]))
    return found


def closed(schema: Json) -> Json:
    """Returns the schema with undeclared fields forbidden; the API server and Serve drop such fields silently."""
    result = dict(schema)
    for key in ("properties", "$defs"):
        if key in schema:
            result[key] = {name: closed(part) for name, part in schema[key].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = closed(schema[key])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            result[key] = [closed(part) for part in schema[key]]
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def errors(schema: Json, instance: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(instance)]


def dashboard() -> Json:
    found = json.loads((K8S / "components" / "monitoring" / "slipstream-dashboard.json").read_text())
    assert isinstance(found, dict)
    return found
