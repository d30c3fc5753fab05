"""The manifests in k8s/: valid for KubeRay and Ray Serve, and true to the configuration that they carry.

Everything is checked as text: no cluster is asked.
"""

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from packaging.requirements import Requirement
from packaging.version import Version
from ray.serve.schema import ServeDeploySchema

from cluster.config import DraftPool, Resources, SlipstreamConfig, TargetPool, validated
from cluster.placement import AUTOSCALING_POLICY, rank_bundle, target_group_options

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
CRD = ROOT.parent / "shared" / "data" / "kuberay" / "ray.io_rayservices.yaml"
IMAGE = "registry.example.com/slipstream"
MAX_NAME = 41  # KubeRay appends to it and must stay within a DNS label


def load(path: Path) -> list[Json]:
    return list(yaml.load_all(path.read_text(), yaml.CSafeLoader))


def manifests() -> list[Json]:
    return [document for path in sorted(K8S.glob("*.yaml")) for document in load(path)]


def of_kind(kind: str) -> list[Json]:
    return [manifest for manifest in manifests() if manifest["kind"] == kind]


def merged(base: Any, patch: Any) -> Any:
    """`patch` over `base`, mappings key by key, anything else replaced: what kustomize does with these patches."""
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return patch
    return base | {key: merged(base.get(key), value) for key, value in patch.items()}


def ray_services() -> dict[str, Json]:
    """Every RayService that may be applied: the complete ones, and those with a patch over them."""
    found = of_kind("RayService")
    complete = {manifest["metadata"]["name"]: manifest for manifest in found if "serveConfigV2" in manifest["spec"]}
    patches = [manifest for manifest in found if "serveConfigV2" not in manifest["spec"]]
    patched = {
        f"{name}-patched-{i}": merged(complete[name], patch)
        for i, patch in enumerate(patches)
        for name in [patch["metadata"]["name"]]
    }
    return complete | patched


def closed(schema: Json) -> Json:
    """The same schema, refusing what it does not declare: the API server drops such fields in silence, Serve too."""
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


def serve_config(service: Json) -> Json:
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert isinstance(config, dict)
    return config


def slipstream_config(service: Json) -> SlipstreamConfig:
    (application,) = serve_config(service)["applications"]
    return validated(application["args"])


def worker_groups(service: Json) -> list[Json]:
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert isinstance(groups, list)
    return groups


def group_for(service: Json, labels: Mapping[str, str]) -> Json:
    """The one worker group whose nodes carry `labels`."""
    (group,) = [group for group in worker_groups(service) if labels.items() <= group["labels"].items()]
    return group


def pods(service: Json) -> Iterator[tuple[dict[str, str], Json]]:
    """Each pod template's labels, those that KubeRay adds among them, and its spec."""
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    for group, name, node_type in [(head, "headgroup", "head")] + [
        (group, group["groupName"], "worker") for group in worker_groups(service)
    ]:
        added = {"ray.io/is-ray-node": "yes", "ray.io/node-type": node_type, "ray.io/group": name}
        yield group["template"]["metadata"]["labels"] | added, group["template"]["spec"]


def ray_resources(group: Json) -> dict[str, float]:
    """What one pod of the group offers to Ray, as Ray's autoscaler reads it from the manifest."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return {"CPU": float(group["rayStartParams"]["num-cpus"]), "GPU": float(limits.get("nvidia.com/gpu", 0))}


def target_reservation(pool: TargetPool) -> dict[str, float]:
    """What a target replica reserves on its one node."""
    bundles = target_group_options(pool)["placement_group_bundles"]
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for bundle in bundles for name in bundle}


def draft_reservation(pool: DraftPool) -> dict[str, float]:
    return rank_bundle(pool.resources)


def replicas_per_pod(group: Json, reservation: Mapping[str, float]) -> int:
    offered = ray_resources(group)
    return min(int(offered.get(name, 0) // amount) for name, amount in reservation.items())


def pool_groups(service: Json) -> list[tuple[Json, dict[str, float], int, int]]:
    """For each pool: its worker group, what a replica reserves, and the pool's bounds."""
    config = slipstream_config(service)
    target = config.target
    draft = config.draft
    return [
        (
            group_for(service, target.resources_per_rank.labels),
            target_reservation(target),
            target.replicas.min,
            target.replicas.max,
        ),
        (
            group_for(service, draft.resources.labels),
            draft_reservation(draft),
            draft.replicas.min,
            draft.replicas.max,
        ),
    ]


def pyproject() -> Json:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked_versions() -> dict[str, Version]:
    lines = (K8S / "requirements.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: Version(version) for name, version in pins}


@pytest.fixture(params=ray_services().items(), ids=lambda item: item[0])
def service(request: pytest.FixtureRequest) -> Json:
    """A RayService, a copy that the test may change."""
    _, manifest = request.param
    return copy.deepcopy(manifest)


@pytest.fixture(scope="module")
def crd_schema() -> Json:
    if not CRD.exists():
        pytest.skip(f"KubeRay's CRD is not beside the repository: {CRD.relative_to(ROOT.parent)}")
    (definition,) = load(CRD)
    (version,) = [version for version in definition["spec"]["versions"] if version["storage"]]
    assert version["name"] == "v1"
    return closed(version["schema"]["openAPIV3Schema"])


@pytest.fixture(scope="module")
def serve_schema() -> Json:
    return closed(ServeDeploySchema.model_json_schema())


class TestKubeRay:
    def test_manifest_is_valid(self, service: Json, crd_schema: Json) -> None:
        assert service["apiVersion"] == "ray.io/v1"
        assert errors(crd_schema, service) == []

    @pytest.mark.parametrize(
        "path",
        [
            (),
            ("spec",),
            ("spec", "rayClusterConfig"),
            ("spec", "rayClusterConfig", "workerGroupSpecs", 0),
            ("spec", "rayClusterConfig", "workerGroupSpecs", 0, "template", "spec", "containers", 0),
            ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "ports", 0),
        ],
    )
    def test_a_misspelt_key_is_refused(self, service: Json, crd_schema: Json, path: tuple[str | int, ...]) -> None:
        place: Any = service
        for step in path:
            place = place[step]
        place["replcas"] = 1
        assert any("replcas" in error for error in errors(crd_schema, service))

    def test_a_wrong_value_is_refused(self, service: Json, crd_schema: Json) -> None:
        worker_groups(service)[0]["maxReplicas"] = "three"
        service["spec"]["rayClusterConfig"]["authOptions"]["mode"] = "tokens"
        assert len(errors(crd_schema, service)) == 2

    def test_rules_that_the_crd_cannot_state(self, service: Json) -> None:
        """What the operator refuses after the API server has accepted the object."""
        name = service["metadata"]["name"]
        spec = service["spec"]
        cluster = spec["rayClusterConfig"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(name) <= MAX_NAME
        assert spec["upgradeStrategy"]["type"] in {"NewCluster", "None"}
        assert Version(cluster["rayVersion"]) >= Version("2.52"), "token authentication needs it"
        for group in [cluster["headGroupSpec"], *worker_groups(service)]:
            assert "labels" not in group["rayStartParams"], "refused; the group has a field of its own for them"
            assert "resources" not in group, "refused beside num-cpus in rayStartParams"
            assert group["template"]["spec"].get("restartPolicy", "Never") == "Never", "autoscaler v2 needs it"

    def test_what_is_the_operators_is_left_to_it(self, service: Json) -> None:
        for _, pod in pods(service):
            (container,) = pod["containers"]
            assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_enable_autoscaler_v2", "RAY_REDIS_ADDRESS"} & {
                variable["name"] for variable in container.get("env", [])
            }
            assert "readinessProbe" not in container, "it would replace the one that knows Serve's proxy"
            assert "livenessProbe" not in container

    def test_the_head_runs_no_replica(self, service: Json) -> None:
        head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
        assert ray_resources(head) == {"CPU": 0, "GPU": 0}

    def test_pods_have_no_privileges(self, service: Json) -> None:
        for _, pod in pods(service):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in pod["containers"]:
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


class TestServeConfig:
    def test_it_is_valid(self, service: Json, serve_schema: Json) -> None:
        config = serve_config(service)
        assert errors(serve_schema, config) == []
        (application,) = ServeDeploySchema.model_validate(config).applications
        assert (application.name, application.route_prefix) == ("slipstream", "/")

    def test_the_policy_sees_both_pools(self, service: Json) -> None:
        """What `build` gives each pool is a policy of that pool alone, by which drafters would not scale."""
        (application,) = serve_config(service)["applications"]
        assert application["autoscaling_policy"] == AUTOSCALING_POLICY

    def test_a_misspelt_key_is_refused(self, service: Json, serve_schema: Json) -> None:
        config = serve_config(service)
        config["applications"][0]["route_prefx"] = "/"
        config["http_option"] = {}
        assert len(errors(serve_schema, config)) == 2

    def test_it_names_a_builder_and_a_deployment_that_exist(self, service: Json) -> None:
        (application,) = serve_config(service)["applications"]
        module, _, function = application["import_path"].partition(":")
        built = getattr(import_module(module), function)(application["args"])
        (overridden,) = application["deployments"]
        assert overridden["name"] == built._bound_deployment.name

    def test_the_arguments_are_a_slipstream_config(self, service: Json) -> None:
        assert isinstance(slipstream_config(service), SlipstreamConfig)


class TestPools:
    """The configuration's pools against the worker groups that must carry them."""

    def test_pools_are_on_groups_of_their_own(self, service: Json) -> None:
        names = [group["groupName"] for group, _, _, _ in pool_groups(service)]
        assert names == ["target", "draft"]

    def test_a_replica_fits_on_one_pod(self, service: Json) -> None:
        """A target replica is STRICT_PACK. Ray's autoscaler knows nothing of a pod but what `ray_resources` reads: a
        pool that asked for an accelerator_type or a custom resource would never be scaled up."""
        for group, reservation, _, _ in pool_groups(service):
            assert replicas_per_pod(group, reservation) >= 1, group["groupName"]

    def test_a_group_too_wide_for_the_pod_is_noticed(self, service: Json) -> None:
        pool = slipstream_config(service).target
        wider = pool.model_copy(update={"tensor_parallel": pool.tensor_parallel + 1})
        group = group_for(service, pool.resources_per_rank.labels)
        assert replicas_per_pod(group, target_reservation(wider)) == 0

    def test_an_accelerator_type_is_noticed(self, service: Json) -> None:
        pool = slipstream_config(service).draft
        typed = pool.model_copy(update={"resources": Resources(num_gpus=1, accelerator_type="L4")})
        group = group_for(service, pool.resources.labels)
        assert replicas_per_pod(group, draft_reservation(typed)) == 0

    def test_the_groups_bounds_hold_the_pools(self, service: Json) -> None:
        for group, reservation, low, high in pool_groups(service):
            each = replicas_per_pod(group, reservation)
            assert group["minReplicas"] == group["replicas"] == -(-low // each), group["groupName"]
            assert group["maxReplicas"] * each >= high, group["groupName"]

    def test_pools_that_scale_have_an_autoscaler_that_knows_labels(self, service: Json) -> None:
        cluster = service["spec"]["rayClusterConfig"]
        if any(low < high for _, _, low, high in pool_groups(service)):
            assert cluster["enableInTreeAutoscaling"] is True
            assert cluster["autoscalerOptions"]["version"] == "v2"

    def test_routers_have_a_group_without_gpus(self, service: Json) -> None:
        ((router,),) = [application["deployments"] for application in serve_config(service)["applications"]]
        options = router["ray_actor_options"]
        group = group_for(service, options["label_selector"])
        assert group not in [pool_group for pool_group, _, _, _ in pool_groups(service)]
        reservation = {"CPU": options["num_cpus"]}
        routers = slipstream_config(service).server.routers
        assert group["replicas"] * replicas_per_pod(group, reservation) == routers

    def test_gpu_requests_equal_limits(self, service: Json) -> None:
        for _, pod in pods(service):
            resources = pod["containers"][0]["resources"]
            for name in ("nvidia.com/gpu", "memory"):
                assert resources["requests"].get(name) == resources["limits"].get(name)

    def test_pods_outlive_the_drain(self, service: Json) -> None:
        drain = slipstream_config(service).server.drain_s
        for group in worker_groups(service):
            assert group["template"]["spec"]["terminationGracePeriodSeconds"] > drain


class TestObjectsAround:
    """The other objects name the pods, ports, claims and models of rayservice.yaml."""

    @pytest.fixture
    def main(self) -> Json:
        return ray_services()["slipstream"]

    @pytest.mark.parametrize("kind", ["PodDisruptionBudget", "PodMonitor"])
    def test_selectors_match_pods(self, main: Json, kind: str) -> None:
        found = of_kind(kind)
        assert found
        for manifest in found:
            wanted = manifest["spec"]["selector"]["matchLabels"].items()
            assert any(wanted <= labels.items() for labels, _ in pods(main)), manifest["metadata"]["name"]

    def test_the_network_policy_covers_every_pod_and_lets_them_speak(self, main: Json) -> None:
        (policy,) = of_kind("NetworkPolicy")
        everyone = policy["spec"]["podSelector"]
        assert all(everyone["matchLabels"].items() <= labels.items() for labels, _ in pods(main))
        assert {"from": [{"podSelector": everyone}]} in policy["spec"]["ingress"]

    def test_ports_are_ports_of_the_pods(self, main: Json) -> None:
        ports = {port["name"]: port["containerPort"] for _, pod in pods(main) for port in pod["containers"][0]["ports"]}
        (policy,) = of_kind("NetworkPolicy")
        (monitor,) = of_kind("PodMonitor")
        scraped = {ports[endpoint["port"]] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}
        assert scraped | {ports["serve"], ports["dashboard"]} == allowed

    def test_the_models_are_those_that_the_job_downloads(self, main: Json) -> None:
        (claim,) = of_kind("PersistentVolumeClaim")
        (job,) = of_kind("Job")
        workers = [pod for _, pod in pods(main) if "volumes" in pod]
        assert len(workers) == len(worker_groups(main))
        for pod in [*workers, job["spec"]["template"]["spec"]]:
            (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "models"]
            assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        config = slipstream_config(main)
        (script,) = job["spec"]["template"]["spec"]["containers"][0]["args"]
        assert set(re.findall(r"^hf download (\S+)", script, re.MULTILINE)) == {config.model.target, config.draft.model}

    def test_kustomization_lists_files_that_exist(self) -> None:
        (kustomization,) = of_kind("Kustomization")
        assert all((K8S / resource).is_file() for resource in kustomization["resources"])


class TestVersions:
    def test_the_image_is_the_same_everywhere(self) -> None:
        files = [K8S / "Dockerfile", K8S / "README.md", *K8S.glob("*.yaml")]
        tags = {tag for file in files for tag in re.findall(rf"{re.escape(IMAGE)}:([\w.-]+)", file.read_text())}
        assert tags == {pyproject()["project"]["version"]}
        images = {
            container["image"]
            for service in ray_services().values()
            for _, pod in pods(service)
            for container in pod["containers"]
        }
        assert images == {f"{IMAGE}:{pyproject()['project']['version']}"}

    def test_ray_is_the_pinned_one(self, service: Json) -> None:
        (ray,) = [r for r in map(Requirement, pyproject()["project"]["dependencies"]) if r.name == "ray"]
        version = Version(service["spec"]["rayClusterConfig"]["rayVersion"])
        assert version in ray.specifier
        assert version == locked_versions()["ray"]

    def test_the_lock_satisfies_the_project(self) -> None:
        locked = locked_versions()
        for requirement in map(Requirement, pyproject()["project"]["dependencies"]):
            assert locked[requirement.name] in requirement.specifier, f"stale k8s/requirements.txt: {requirement}"


class TestDockerfile:
    @pytest.fixture
    def copied(self) -> set[str]:
        lines = (K8S / "Dockerfile").read_text().splitlines()
        return {source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]}

    def test_it_copies_what_the_build_needs(self, copied: set[str]) -> None:
        packages = {pattern.rstrip("*") for pattern in pyproject()["tool"]["setuptools"]["packages"]["find"]["include"]}
        project = pyproject()["project"]
        assert packages | {"pyproject.toml", project["readme"], *project["license-files"]} <= copied

    def test_the_ignore_file_lets_through_what_is_copied(self, copied: set[str]) -> None:
        lines = (K8S / "Dockerfile.dockerignore").read_text().splitlines()
        assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied

    def test_it_runs_as_the_user_of_the_manifests(self, service: Json) -> None:
        (user,) = re.findall(r"^USER (\d+)$", (K8S / "Dockerfile").read_text(), re.MULTILINE)
        assert {pod["securityContext"]["runAsUser"] for _, pod in pods(service)} == {int(user)}
