"""Manifests in k8s/ are valid for Kubernetes, KubeRay and Ray Serve, and match their configuration.

All checks work on text, without a cluster.
"""

import copy
import gzip
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from ray.serve.schema import ServeDeploySchema

from cluster.config import DraftPool, Resources, SlipstreamConfig, TargetPool
from cluster.placement import rank_bundle, target_group_options
from tests.unit.k8s.overlays import (
    K8S,
    OVERLAYS,
    PROJECT,
    ROOT,
    Json,
    closed,
    deployment_parts,
    deployments,
    errors,
    of_kind,
    overlay_config,
    pods,
    ray_service_of,
    serve_config,
    slipstream_config,
    worker_group_specs,
)
from tests.unit.k8s.schemas import CERT_MANAGER, MONITORING, SCHEMAS

CRD = ROOT / "tests" / "data" / "kuberay" / "ray.io_rayservices.yaml.gz"  # published with KubeRay 1.7
KUBERNETES = "1.34"  # version of the schemas of built-in kinds
BUILT_IN = {"v1", "batch/v1", "policy/v1", "networking.k8s.io/v1"}
IMAGE = "registry.example.com/slipstream"
UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
MAX_NAME = 41  # KubeRay appends suffixes, which must fit into a DNS label
DEPLOYMENTS = deployments()


def in_bytes(quantity: str) -> int:
    """Converts a memory quantity to bytes."""
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def group_for(service: Json, labels: Mapping[str, str]) -> Json:
    """Returns the only worker group whose nodes have `labels`."""
    (group,) = [group for group in worker_group_specs(service) if labels.items() <= group["labels"].items()]
    return group


def ray_resources(group: Json) -> dict[str, float]:
    """Returns a pod's Ray resources, derived from the manifest like in Ray's autoscaler."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return {"CPU": float(group["rayStartParams"]["num-cpus"]), "GPU": float(limits.get("nvidia.com/gpu", 0))}


def target_reservation(pool: TargetPool) -> dict[str, float]:
    """Returns a target replica's reservation on its node."""
    bundles = target_group_options(pool)["placement_group_bundles"]
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for bundle in bundles for name in bundle}


def draft_reservation(pool: DraftPool) -> dict[str, float]:
    return rank_bundle(pool.resources)


def replicas_per_pod(group: Json, reservation: Mapping[str, float]) -> int:
    offered = ray_resources(group)
    return min(int(offered.get(name, 0) // amount) for name, amount in reservation.items())


def built_deployments(service: Json) -> dict[str, Any]:
    """Returns the deployments of the built application, by name."""
    (application,) = serve_config(service)["applications"]
    module, _, function = application["import_path"].partition(":")
    router = getattr(import_module(module), function)(application["args"])._bound_deployment
    return {one.name: one for one in (router, *(pool._bound_deployment for pool in router.init_args[1].values()))}


def pool_groups(service: Json) -> list[tuple[Json, dict[str, float], int, int]]:
    """Returns each pool's worker group, reservation and bounds."""
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


@pytest.fixture(params=DEPLOYMENTS)
def objects(request: pytest.FixtureRequest) -> list[Json]:
    """Returns a mutable copy of all objects of a deployment."""
    return copy.deepcopy(DEPLOYMENTS[request.param])


@pytest.fixture
def service(objects: list[Json]) -> Json:
    return ray_service_of(objects)


@pytest.fixture(scope="module")
def crd_schema() -> Json:
    definition = yaml.load(gzip.decompress(CRD.read_bytes()), yaml.CSafeLoader)
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

    def test_an_invalid_value_is_refused(self, service: Json, crd_schema: Json) -> None:
        worker_group_specs(service)[0]["maxReplicas"] = "three"
        service["spec"]["rayClusterConfig"]["authOptions"]["mode"] = "tokens"
        assert len(errors(crd_schema, service)) == 2

    def test_further_rules_beyond_the_crd(self, service: Json) -> None:
        """The rules cover refusals by the operator after the API server has accepted an object."""
        name = service["metadata"]["name"]
        spec = service["spec"]
        cluster = spec["rayClusterConfig"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(name) <= MAX_NAME
        assert spec["upgradeStrategy"]["type"] in {"NewCluster", "None"}
        assert Version(cluster["rayVersion"]) >= Version("2.52"), "token authentication needs it"
        for group in [cluster["headGroupSpec"], *worker_group_specs(service)]:
            assert "labels" not in group["rayStartParams"], "refused; the group has a field of its own for them"
            assert "resources" not in group, "refused beside num-cpus in rayStartParams"
            assert group["template"]["spec"].get("restartPolicy", "Never") == "Never", "autoscaler v2 needs it"

    def test_operator_owned_fields_are_not_set(self, service: Json) -> None:
        for labels, pod in pods(service):
            (container,) = pod["containers"]
            assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_enable_autoscaler_v2", "RAY_REDIS_ADDRESS"} & {
                variable["name"] for variable in container.get("env", [])
            }
            if labels["ray.io/group"] != "router":
                assert "readinessProbe" not in container, "it would replace the one that knows Serve's proxy"
            assert "livenessProbe" not in container, "a pod would be restarted for what another pod's router does"

    def test_readiness_follows_the_routers_health(self, service: Json) -> None:
        """The probe checks that Serve's proxy is not draining, like KubeRay's probe, and that a router is ready."""
        (pod,) = [pod for labels, pod in pods(service) if labels["ray.io/group"] == "router"]
        probe = pod["containers"][0]["readinessProbe"]
        script = probe["exec"]["command"][-1]
        assert re.findall(r"http://localhost:8000(\S+)", script) == ["/-/healthz", "/health/ready"]
        assert sum(map(int, re.findall(r"-T (\d+)", script))) < probe["timeoutSeconds"]

    def test_rays_ports_require_a_token(self, service: Json) -> None:
        assert service["spec"]["rayClusterConfig"]["authOptions"]["mode"] == "token"

    def test_the_head_has_no_replicas(self, service: Json) -> None:
        head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
        assert ray_resources(head) == {"CPU": 0, "GPU": 0}

    def test_pods_have_no_privileges(self, objects: list[Json]) -> None:
        service = ray_service_of(objects)
        jobs = [job["spec"]["template"]["spec"] for job in of_kind(objects, "Job")]
        for pod in [*(pod for _, pod in pods(service)), *jobs]:
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in pod["containers"]:
                assert container["securityContext"] == UNPRIVILEGED
        autoscaler = service["spec"]["rayClusterConfig"].get("autoscalerOptions", {})
        assert autoscaler.get("securityContext", UNPRIVILEGED) == UNPRIVILEGED

    def test_writable_paths_are_volumes(self, objects: list[Json]) -> None:
        """Ray writes logs to /tmp and uses shared memory; kernel compilers cache their output in the home folder."""
        service = ray_service_of(objects)
        jobs = [job["spec"]["template"]["spec"] for job in of_kind(objects, "Job")]
        for pod in [*(pod for _, pod in pods(service)), *jobs]:
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            (container,) = pod["containers"]
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            for path in ("/tmp", "/home/slipstream", "/dev/shm"):
                assert "emptyDir" in volumes[mounts[path]], path
        cluster = service["spec"]["rayClusterConfig"]
        head_volumes = {volume["name"] for volume in cluster["headGroupSpec"]["template"]["spec"]["volumes"]}
        for mount in cluster.get("autoscalerOptions", {}).get("volumeMounts", []):
            assert mount["name"] in head_volumes, "the autoscaler is a container of the head's pod"

    def test_weights_are_mounted_read_only(self, service: Json) -> None:
        for group in worker_group_specs(service):
            pod = group["template"]["spec"]
            (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "models"]
            assert volume["persistentVolumeClaim"]["readOnly"] is True
            (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "models"]
            assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}
            env = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
            assert (env["HF_HOME"], env["HF_HUB_OFFLINE"]) == ("/models", "1")

    def test_shared_memory_fits_the_memory_and_the_object_store(self, service: Json) -> None:
        for group in [service["spec"]["rayClusterConfig"]["headGroupSpec"], *worker_group_specs(service)]:
            pod = group["template"]["spec"]
            (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "shared-memory"]
            shared = in_bytes(volume["emptyDir"]["sizeLimit"])
            assert int(group["rayStartParams"]["object-store-memory"]) <= shared
            assert shared < in_bytes(pod["containers"][0]["resources"]["limits"]["memory"])


class TestBuiltInKinds:
    def test_every_object_has_a_schema_or_is_checked_elsewhere(self, objects: list[Json]) -> None:
        elsewhere = {"ray.io/v1", MONITORING, CERT_MANAGER}
        assert {each["apiVersion"] for each in objects} <= BUILT_IN | elsewhere
        strangers = {each["kind"] for each in objects if each["apiVersion"] not in BUILT_IN}
        assert strangers <= {"RayService"} | SCHEMAS.keys()

    def test_objects_are_valid(self, objects: list[Json]) -> None:
        found = [each for each in objects if each["apiVersion"] in BUILT_IN]
        assert {"Service", "NetworkPolicy", "PersistentVolumeClaim", "Job"} <= {each["kind"] for each in found}
        for each in found:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)

    def test_a_misspelt_key_is_refused(self, objects: list[Json]) -> None:
        (service,) = of_kind(objects, "Service")
        service["spec"]["ports"][0]["targetport"] = "serve"
        with pytest.raises(kubernetes_validate.ValidationError, match="targetport"):
            kubernetes_validate.validate(service, KUBERNETES, strict=True)

    def test_objects_are_distinct(self, objects: list[Json]) -> None:
        names = [(each["kind"], each["metadata"]["name"]) for each in objects]
        assert len(set(names)) == len(names)


class TestServeConfig:
    def test_serve_config_is_valid(self, service: Json, serve_schema: Json) -> None:
        config = serve_config(service)
        assert errors(serve_schema, config) == []
        (application,) = ServeDeploySchema.model_validate(config).applications
        assert (application.name, application.route_prefix) == ("slipstream", "/")

    def test_a_misspelt_key_is_refused(self, service: Json, serve_schema: Json) -> None:
        config = serve_config(service)
        config["applications"][0]["route_prefx"] = "/"
        config["http_option"] = {}
        assert len(errors(serve_schema, config)) == 2

    def test_the_builder_and_deployments_exist(self, service: Json) -> None:
        assert deployment_parts(service).keys() == built_deployments(service).keys()

    def test_the_arguments_are_a_configuration(self, service: Json) -> None:
        assert isinstance(slipstream_config(service), SlipstreamConfig)


class TestPools:
    """The configuration's pools fit their worker groups."""

    def test_pools_have_separate_groups(self, service: Json) -> None:
        names = [group["groupName"] for group, _, _, _ in pool_groups(service)]
        assert names == ["target", "draft"]

    def test_a_replica_fits_on_one_pod(self, service: Json) -> None:
        """A target replica uses STRICT_PACK placement.

        Ray's autoscaler knows only the pod resources that `ray_resources` reads, so a pool with an accelerator_type or
        a custom resource would never scale up.
        """
        for group, reservation, _, _ in pool_groups(service):
            assert replicas_per_pod(group, reservation) >= 1, group["groupName"]

    def test_a_target_too_large_for_the_pod_is_detected(self, service: Json) -> None:
        pool = slipstream_config(service).target
        wider = pool.model_copy(update={"tensor_parallel": pool.tensor_parallel + 1})
        group = group_for(service, pool.resources_per_rank.labels)
        assert replicas_per_pod(group, target_reservation(wider)) == 0

    def test_an_accelerator_type_is_detected(self, service: Json) -> None:
        pool = slipstream_config(service).draft
        typed = pool.model_copy(update={"resources": Resources(num_gpus=1, accelerator_type="L4")})
        group = group_for(service, pool.resources.labels)
        assert replicas_per_pod(group, draft_reservation(typed)) == 0

    def test_group_bounds_cover_the_pools(self, service: Json) -> None:
        for group, reservation, low, high in pool_groups(service):
            each = replicas_per_pod(group, reservation)
            assert group["minReplicas"] == group["replicas"] == -(-low // each), group["groupName"]
            assert group["maxReplicas"] * each >= high, group["groupName"]

    def test_scaling_pools_have_a_label_aware_autoscaler(self, service: Json) -> None:
        cluster = service["spec"]["rayClusterConfig"]
        if any(low < high for _, _, low, high in pool_groups(service)):
            assert cluster["enableInTreeAutoscaling"] is True
            assert cluster["autoscalerOptions"]["version"] == "v2"

    def test_routers_have_a_group_without_gpus(self, service: Json) -> None:
        options = deployment_parts(service)["Router"]["ray_actor_options"]
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
        """Ray waits longer for replicas than Serve, and Kubernetes waits longer than Ray."""
        config = slipstream_config(service)
        parts = deployment_parts(service)
        replicas = max(
            parts[name].get("graceful_shutdown_timeout_s", built._deployment_config.graceful_shutdown_timeout_s)
            for name, built in built_deployments(service).items()
        )
        assert replicas > max(config.server.drain_s, config.target.drain_s)
        for group in worker_group_specs(service):
            pod = group["template"]["spec"]
            env = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
            ray = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
            assert replicas < ray < pod["terminationGracePeriodSeconds"]

    def test_the_head_has_no_drain_time(self, service: Json) -> None:
        """With a drain time, Kubernetes would kill the head during Ray's drain, before its processes end."""
        pod = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
        env = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
        assert env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"

    def test_drafters_have_room_for_the_targets_sessions(self, service: Json) -> None:
        """This covers both bounds, because a session without a drafter loses speculation."""
        config = slipstream_config(service)
        for bound in ("min", "max"):
            drafted = getattr(config.draft.replicas, bound) * config.draft.max_sessions
            assert drafted >= getattr(config.target.replicas, bound) * config.target.max_sessions

    def test_routers_admit_what_targets_can_serve(self, service: Json) -> None:
        config = slipstream_config(service)
        assert (
            config.server.routers * config.server.max_requests
            >= config.target.replicas.max * config.target.max_sessions
        )


class TestHttp:
    """Client requests enter only through routers."""

    @pytest.fixture
    def router_service(self, objects: list[Json]) -> Json:
        (found,) = of_kind(objects, "Service")
        return found

    def test_the_service_selects_only_router_pods(self, router_service: Json, service: Json) -> None:
        wanted = router_service["spec"]["selector"].items()
        assert [labels["ray.io/group"] for labels, _ in pods(service) if wanted <= labels.items()] == ["router"]

    def test_router_pods_run_a_router(self, router_service: Json, service: Json) -> None:
        router = deployment_parts(service)["Router"]
        group = group_for(service, router["ray_actor_options"]["label_selector"])
        assert group["groupName"] == router_service["spec"]["selector"]["ray.io/group"]

    def test_the_service_uses_the_serving_port(self, router_service: Json, service: Json) -> None:
        (port,) = router_service["spec"]["ports"]
        for labels, pod in pods(service):
            if labels["ray.io/group"] == "router":
                ports = {each["name"]: each["containerPort"] for each in pod["containers"][0]["ports"]}
                assert ports[port["targetPort"]] == port["port"] == 8000

    def test_clients_reach_only_router_pods(self, objects: list[Json], service: Json) -> None:
        open_to_clients = []
        for policy in of_kind(objects, "NetworkPolicy"):
            wanted = policy["spec"]["podSelector"]["matchLabels"].items()
            for rule in policy["spec"]["ingress"]:
                if any("slipstream-clients" in str(source) for source in rule["from"]):
                    assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]
                    open_to_clients += [
                        labels["ray.io/group"] for labels, _ in pods(service) if wanted <= labels.items()
                    ]
        assert open_to_clients == ["router"]


class TestObjectsAround:
    """Other objects reference existing pods, ports, claims and models of the RayService."""

    @pytest.mark.parametrize("kind", ["PodDisruptionBudget", "PodMonitor"])
    def test_selectors_match_pods(self, kind: str) -> None:
        objects = DEPLOYMENTS["l4-h100"]
        found = of_kind(objects, kind)
        assert found
        for manifest in found:
            wanted = manifest["spec"]["selector"]["matchLabels"].items()
            assert any(wanted <= labels.items() for labels, _ in pods(ray_service_of(objects))), manifest["metadata"]

    def test_every_process_is_scraped(self) -> None:
        """A monitor silently drops pods without the named port."""
        objects = DEPLOYMENTS["l4-h100"]
        scraped: dict[str, set[str]] = {}
        for labels, pod in pods(ray_service_of(objects)):
            endpoints = [
                endpoint["port"]
                for monitor in of_kind(objects, "PodMonitor")
                if monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
                for endpoint in monitor["spec"]["podMetricsEndpoints"]
            ]
            scraped[labels["ray.io/group"]] = {
                port["name"]
                for container in pod["containers"]
                for port in container["ports"]
                if port["name"] in endpoints
            }
        everyone = {"metrics"}
        head = everyone | {"as-metrics", "dash-metrics"}
        assert scraped == {"headgroup": head, "target": everyone, "draft": everyone, "router": everyone}

    def test_the_network_policy_covers_every_pod_and_allows_their_traffic(
        self, objects: list[Json], service: Json
    ) -> None:
        (policy,) = [each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"] == "slipstream"]
        everyone = policy["spec"]["podSelector"]
        assert all(everyone["matchLabels"].items() <= labels.items() for labels, _ in pods(service))
        assert {"from": [{"podSelector": everyone}]} in policy["spec"]["ingress"]

    def test_opened_ports_exist_on_their_pods(self) -> None:
        objects = DEPLOYMENTS["l4-h100"]
        scraped = set()
        everywhere = {}
        for labels, pod in pods(ray_service_of(objects)):
            ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
            everywhere |= ports
            for monitor in of_kind(objects, "PodMonitor"):
                if monitor["spec"]["selector"]["matchLabels"].items() <= labels.items():
                    scraped |= {
                        ports[each["port"]] for each in monitor["spec"]["podMetricsEndpoints"] if each["port"] in ports
                    }
        allowed = {
            port["port"]
            for policy in of_kind(objects, "NetworkPolicy")
            for rule in policy["spec"]["ingress"]
            for port in rule.get("ports", [])
        }
        assert scraped | {everywhere["dashboard"], everywhere["serve"]} == allowed

    def test_the_job_downloads_the_configured_models(self, objects: list[Json], service: Json) -> None:
        (claim,) = of_kind(objects, "PersistentVolumeClaim")
        (job,) = of_kind(objects, "Job")
        workers = [group["template"]["spec"] for group in worker_group_specs(service)]
        for pod in [*workers, job["spec"]["template"]["spec"]]:
            (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "models"]
            assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        config = slipstream_config(service)
        (script,) = job["spec"]["template"]["spec"]["containers"][0]["args"]
        downloaded = re.findall(r"^  hf download (\S+)", script, re.MULTILINE)
        assert set(downloaded) == {config.model.target, config.draft.model}

    def test_a_single_node_volume_is_used_on_one_node(self, objects: list[Json], service: Json) -> None:
        (claim,) = of_kind(objects, "PersistentVolumeClaim")
        selectors = {str(pod.get("nodeSelector")) for _, pod in pods(service)}
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"] or len(selectors) == 1


class TestOverlays:
    @pytest.mark.parametrize("name", OVERLAYS)
    def test_the_volume_has_all_folders(self, name: str) -> None:
        assert {path.name for path in (K8S / "overlays").iterdir()} == set(OVERLAYS)
        config = overlay_config(name)
        gpus = config.target.resources_per_rank.num_gpus + config.draft.resources.num_gpus
        assert (gpus == 0) == (name == "local-cpu")
        bounds = [(pool.replicas.min, pool.replicas.max) for pool in (config.target, config.draft)]
        assert bounds == [(1, 1), (1, 1)] or name == "l4-h100"

    @pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
    @pytest.mark.parametrize("name", OVERLAYS)
    def test_kustomize_builds_the_same_objects(self, name: str) -> None:
        command = ["kubectl", "kustomize", str(K8S / "overlays" / name)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout

        def by_name(objects: list[Json]) -> dict[tuple[str, str], Json]:
            return {(each["kind"], each["metadata"]["name"]): each for each in objects}

        assert by_name(list(yaml.safe_load_all(text))) == by_name(DEPLOYMENTS[name])


class TestVersions:
    def test_the_image_is_the_same_everywhere(self) -> None:
        version = PROJECT["project"]["version"]
        files = [K8S / "images" / "Dockerfile", K8S / "README.md", *K8S.rglob("*.yaml")]
        tags = {tag for file in files for tag in re.findall(rf"{re.escape(IMAGE)}:([\w.-]+)", file.read_text())}
        assert tags == {version, f"{version}-cpu"}

    def test_every_pod_runs_the_configured_image(self) -> None:
        for name in OVERLAYS:
            objects = DEPLOYMENTS[name]
            jobs = [job["spec"]["template"]["spec"] for job in of_kind(objects, "Job")]
            specs = [*(pod for _, pod in pods(ray_service_of(objects))), *jobs]
            images = {container["image"] for pod in specs for container in pod["containers"]}
            assert images == {overlay_config(name).kubernetes.image}
            assert overlay_config(name).kubernetes.image.endswith("-cpu") == (name == "local-cpu")  # type: ignore[union-attr]

    def test_ray_has_the_pinned_version(self, service: Json) -> None:
        (ray,) = [r for r in map(Requirement, PROJECT["project"]["dependencies"]) if r.name == "ray"]
        assert Version(service["spec"]["rayClusterConfig"]["rayVersion"]) in ray.specifier
