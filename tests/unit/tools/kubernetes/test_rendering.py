"""Tests rendering of manifests: refusals, derived values, and committed files."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from actors.models.checkpoint import DESCRIPTION
from cluster.config import SlipstreamConfig, validated
from cluster.errors import ConfigError
from cluster.placement import AUTOSCALING_POLICY
from cluster.trust import PeerRole
from tests.unit.k8s.overlays import K8S, OVERLAYS, load, overlay_config
from tools.cli import app
from tools.kubernetes.ray_service import in_pods, serve_config, worker_groups
from tools.kubernetes.rendering import check, downloads, rendered

PLAIN: dict[str, Any] = {
    "model": {"target": "some/model"},
    "draft": {"model": "a/draft"},
    "trust": {"insecure": True},
    "server": {"insecure": True},
    "kubernetes": {"image": "a:1"},
}


def config(**sections: dict[str, Any]) -> SlipstreamConfig:
    return validated({name: PLAIN.get(name, {}) | sections.get(name, {}) for name in {*PLAIN, *sections}})


def faults(**sections: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config(**sections))
    return str(error.value).splitlines()[1:]


@pytest.mark.parametrize("name", OVERLAYS)
def test_rendered_files_match_the_repository(name: str) -> None:
    folder = K8S / "overlays" / name
    files = rendered(overlay_config(name), "slipstream.yaml")
    assert {file: (folder / file).read_text() for file in files} == files, (
        f"slipstream k8s render {folder}/slipstream.yaml"
    )
    assert {path.name for path in folder.iterdir()} == {"slipstream.yaml", *files}


def test_a_minimal_configuration_renders() -> None:
    check(config())


@pytest.mark.parametrize(
    ("pool", "resources"), [("target", "resources_per_rank"), ("draft", "resources")], ids=["target", "draft"]
)
def test_an_accelerator_type_is_refused_with_the_label_to_use(pool: str, resources: str) -> None:
    (fault,) = faults(**{pool: {resources: {"num_gpus": 1, "accelerator_type": "H100"}}})
    assert f"{pool}.{resources}.accelerator_type is H100" in fault
    assert f"use {pool}.{resources}.labels: {{ray.io/accelerator-type: H100}}" in fault


def test_the_suggested_label_is_on_the_pools_group() -> None:
    labels = {"ray.io/accelerator-type": "L4"}
    (group,) = [each for each in worker_groups(config(draft={"resources": {"labels": labels}})) if each.name == "draft"]
    assert group.labels == labels | {"pool": "draft"}


def test_custom_resources_and_reserved_labels_are_refused() -> None:
    (custom,) = faults(draft={"resources": {"custom": {"fast": 1}}})
    assert "draft.resources.custom has fast" in custom
    (label,) = faults(target={"resources_per_rank": {"labels": {"pool": "mine"}}})
    assert "target.resources_per_rank.labels has a label pool" in label


def test_an_expression_that_no_node_can_have_as_a_label_is_refused() -> None:
    (fault,) = faults(draft={"resources": {"labels": {"ray.io/accelerator-type": "in(L4, A10G)", "zone": "a-1"}}})
    assert "draft.resources.labels has in(L4, A10G), but" in fault


def test_learning_is_refused_without_a_volume_for_it() -> None:
    (fault,) = faults(draft={"learning": {"folder": "/models/learned"}})
    assert "no writable volume" in fault


def test_an_unknown_pool_is_refused_with_the_names() -> None:
    (fault,) = faults(kubernetes={"pools": {"target-xyz": {"memory": "99Gi"}, "draft": {}}})
    assert fault.strip() == "kubernetes.pools has target-xyz, expected names of pools: target, draft"


@pytest.mark.parametrize("change", [{"kubernetes": {"image": "a:2"}}, {"draft": {"model": "another/draft"}}])
def test_a_changed_download_is_another_job(change: dict[str, Any]) -> None:
    """Kubernetes does not allow changes to a job."""

    def job_name(given: SlipstreamConfig) -> str:
        _, job = yaml.safe_load_all(rendered(given, "c.yaml")["models.yaml"])
        return str(job["metadata"]["name"])

    assert job_name(config()) == job_name(config())
    assert job_name(config(**change)) != job_name(config())


def test_every_pod_may_use_the_private_registry() -> None:
    files = rendered(config(kubernetes={"image_pull_secrets": ["registry"]}), "c.yaml")
    _, job = yaml.safe_load_all(files["models.yaml"])
    cluster = yaml.safe_load(files["rayservice.yaml"])["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [job["spec"]["template"], *(group["template"] for group in groups)]
    assert [pod["spec"]["imagePullSecrets"] for pod in pods] == [[{"name": "registry"}]] * len(pods)


def test_a_missing_image_and_another_port_are_both_named() -> None:
    found = faults(kubernetes={"image": None}, server={"port": 9000})
    assert [fault.split()[0] for fault in found] == ["kubernetes.image", "server.port"]


def test_pods_without_keys_are_refused_unless_insecure() -> None:
    (fault,) = faults(server={"insecure": False})
    assert "server.keys is empty" in fault
    check(config(server={"insecure": False, "keys": {"a": {"sha256": "0" * 64}}}))


def test_missing_trust_and_unmounted_certificates_are_refused() -> None:
    (fault,) = faults(trust={"insecure": False})
    assert "set one, or trust.insecure: true" in fault
    for folder in ("certificates/{role}", "/etc/slipstream"):
        (fault,) = faults(trust={"insecure": False, "certificates": folder})
        assert f"trust.certificates is {folder}, expected an absolute path with {{role}}" in fault


def secrets_of(pod: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (mount path, name) of each secret in a pod."""
    mounted = {each["name"]: each for each in pod["containers"][0]["volumeMounts"]}
    secrets = [(each["name"], each["secret"]["secretName"]) for each in pod["volumes"] if "secret" in each]
    assert all(mounted[name]["readOnly"] for name, _ in secrets)
    return [(mounted[name]["mountPath"], secret) for name, secret in secrets]


@pytest.mark.parametrize("folder", ["/etc/slipstream/token", "/secrets"])
def test_every_group_mounts_the_token_at_the_configured_path(folder: str) -> None:
    trust = {"insecure": False, "token_file": f"{folder}/tokens"}
    service = yaml.safe_load(rendered(config(trust=trust), "c.yaml")["rayservice.yaml"])
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [secrets_of(group["template"]["spec"]) for group in groups] == [[(folder, "slipstream-token")]] * 3


@pytest.mark.parametrize(
    "path",
    [
        "tokens",
        "secrets/tokens",
        "/tokens",
        "/etc/tokens",
        "/usr/lib/tokens",
        "/var/run/tokens",
        "/tmp/tokens",
        "/home/tokens",
        "/home/slipstream/tokens",
        "/dev/shm/tokens",
        "/models/tokens",
        "/models/trust/tokens",
    ],
)
def test_an_unmounted_token_is_refused(path: str) -> None:
    (fault,) = faults(trust={"insecure": False, "token_file": path})
    assert f"trust.token_file is {path}, expected an absolute path in a folder of its own" in fault


def test_records_of_audits_need_a_writable_folder() -> None:
    (fault,) = faults(server={"audit": {"share": 0.1, "records": "/var/log/audits.jsonl"}})
    assert "server.audit.records is /var/log/audits.jsonl, but pods can write only to /tmp" in fault
    assert "use the routers' logs" in fault
    for records in ("/tmp/audits.jsonl", "audits.jsonl"):
        check(config(server={"audit": {"share": 0.1, "records": records}}))


def test_each_group_mounts_the_certificate_of_its_role() -> None:
    trust = {"insecure": False, "certificates": "/etc/slipstream/{role}"}
    service = yaml.safe_load(rendered(config(trust=trust), "c.yaml")["rayservice.yaml"])
    made = {
        each["spec"]["secretName"]: each["spec"]["dnsNames"]
        for each in load(K8S / "components" / "certificates" / "certificates.yaml")
        if "dnsNames" in each["spec"]
    }
    found = {}
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        ((path, secret),) = secrets_of(pod)
        found[group["groupName"]] = (path, made[secret])
    assert found == {
        "target": ("/etc/slipstream/target", [PeerRole.TARGET.name_in_certificate]),
        "draft": ("/etc/slipstream/drafter", [PeerRole.DRAFTER.name_in_certificate]),
        "router": ("/etc/slipstream/router", [PeerRole.ROUTER.name_in_certificate]),
    }


def test_autoscaling_policy_and_keep_alive_are_rendered() -> None:
    """`build` gives each pool its own policy, and drafters would not scale with it."""
    found = serve_config(config(server={"keep_alive_s": 77}))
    (application,) = found["applications"]
    assert application["autoscaling_policy"] == AUTOSCALING_POLICY
    assert found["http_options"] == {"keep_alive_timeout_s": 77}


def test_pods_have_the_gpus_and_cpus_of_their_replicas() -> None:
    target = {"tensor_parallel": 4, "resources_per_rank": {"num_gpus": 1, "num_cpus": 2}}
    draft = {"resources": {"num_gpus": 0.25, "num_cpus": 0.5}, "replicas": {"min": 5, "max": 9}}
    groups = worker_groups(config(target=target, draft=draft, kubernetes={"draft": {"replicas": 4}}))
    assert [(group.name, group.gpus, group.cpus) for group in groups] == [
        ("target", 4, 9),  # includes the coordinator's share of a CPU
        ("draft", 1, 2),
        ("router", 0, 1),
    ]
    assert [(group.least, group.most) for group in groups] == [(1, 1), (2, 6), (1, 1)]


@pytest.mark.parametrize(("ranks", "share", "gpus"), [(4, 0.75, 4), (3, 0.6, 3), (2, 2, 4), (1, 0.3, 1)])
def test_no_share_of_a_gpu_is_split_over_two(ranks: int, share: float, gpus: int) -> None:
    target = {"tensor_parallel": ranks, "resources_per_rank": {"num_gpus": share}}
    assert next(iter(worker_groups(config(target=target)))).gpus == gpus


def test_a_gpu_holds_two_drafters_that_use_two_fifths_each() -> None:
    draft = {"resources": {"num_gpus": 0.4}}
    groups = worker_groups(config(draft=draft, kubernetes={"draft": {"replicas": 5}}))
    assert {group.name: group.gpus for group in groups}["draft"] == 3


def test_the_rendered_configuration_has_labels_and_only_useful_keys() -> None:
    given = config(server={"routers": 3, "host": "0.0.0.0"}, target={"max_sessions": 5})
    again = in_pods(given)
    assert again.target.resources_per_rank.labels == {"pool": "target"}
    assert again.draft.resources.labels == {"pool": "draft"}
    assert (again.server.routers, again.server.host, again.target.max_sessions) == (3, "127.0.0.1", 5)
    assert again.kubernetes.image is None
    assert again.model == given.model


def test_each_pool_of_several_models_has_a_worker_group() -> None:
    models = {
        "large": {"model": {"target": "some/Large"}, "target": {"resources_per_rank": {"num_gpus": 4}}},
        "small": {"model": {"target": "some/Small"}, "draft": "cheap"},
    }
    shared = {name: PLAIN[name] for name in ("draft", "trust", "server")}
    pods = {"image": "a:1", "components": ["disruption-budget"], "pools": {"target-large": {"memory": "99Gi"}}}
    given = validated({"models": models, "drafts": {"cheap": {"method": "ngram"}}, "kubernetes": pods, **shared})
    groups = {group.name: group for group in worker_groups(given)}
    assert list(groups) == ["target-large", "target-small", "draft", "draft-cheap", "router"]
    assert [groups[name].gpus for name in groups] == [4, 0, 0, 0, 0]
    assert [groups[name].pods.memory for name in ("target-large", "target-small")] == ["99Gi", "8Gi"]
    again = in_pods(given)
    for one in again.served:
        assert one.config.target.resources_per_rank.labels == {"pool": one.target.lower()}
        assert one.config.draft.resources.labels == {"pool": one.drafter.lower().replace("drafter", "draft")}
    assert list(downloads(given)) == ["some/Large", "a/draft", "some/Small"]
    service, *budgets = yaml.safe_load_all(rendered(given, "c.yaml")["rayservice.yaml"])
    selected = [one["spec"]["selector"]["matchLabels"]["ray.io/group"] for one in budgets]
    assert selected == ["target-large", "target-small"]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    names = ["Target-large", "Target-small", "Drafter", "Drafter-cheap", "Router"]
    assert [one["name"] for one in application["deployments"]] == names


def test_models_on_the_volume_are_not_downloaded() -> None:
    assert list(downloads(config())) == ["some/model", "a/draft"]
    local = config(model={"target": "/models/mine"}, draft={"model": None, "method": "ngram"})
    assert not downloads(local)
    adapters = {"engine": "vllm", "vllm": {"enable_lora": True}, "adapters": {"a": "/models/a", "b": "some/adapter"}}
    assert list(downloads(config(target={**adapters, "cache_per_rank": {"gib": 1}})))[-1] == "some/adapter"
    assert "kind: Job" not in rendered(local, "c.yaml")["models.yaml"]


def test_folders_outside_the_volume_are_refused() -> None:
    vllm = {"engine": "vllm", "vllm": {"enable_lora": True}, "cache_per_rank": {"gib": 1}}
    found = faults(
        model={"target": "/home/me/mine"},
        target={**vllm, "adapters": {"a": "/models-old/a", "b": "some/adapter", "c": "/models/c"}},
        draft={"model": "/home/me/draft", "tokenizer": "/home/me/words", "method": "draft_model"},
    )
    keys = ["model.target", "target.adapters.a", "draft.model", "draft.tokenizer"]
    assert [fault.split()[0] for fault in found] == keys
    assert "model.target is /home/me/mine, but pods mount only the volume at /models" in found[0]
    assert "copy the folder to the volume and use /models/mine" in found[0]


def test_folders_of_several_models_are_refused_by_their_own_keys() -> None:
    models = {"a": {"model": {"target": "/a"}}, "b": {"model": {"target": "/models/b"}, "draft": "fast"}}
    shared = {name: PLAIN[name] for name in ("draft", "trust", "server", "kubernetes")}
    with pytest.raises(ConfigError) as error:
        check(validated({"models": models, "drafts": {"fast": {"model": "/fast"}}, **shared}))
    keys = [line.split()[0] for line in str(error.value).splitlines()[1:]]
    assert keys == ["models.a.model.target", "drafts.fast.model"]


def test_a_tokenizer_is_downloaded_without_the_weights_of_its_model() -> None:
    """Offline, the pods look for the files that match `DESCRIPTION`."""
    other = config(draft={"model": "/models/draft", "tokenizer": "a/tokenizer", "method": "draft_model"})
    assert list(downloads(other)) == ["some/model", "a/tokenizer"]
    included = re.findall(r"--include '(\S+)'", downloads(other)["a/tokenizer"])
    assert included == list(DESCRIPTION)
    equal = config(draft={"model": "/models/draft", "tokenizer": "some/model", "method": "draft_model"})
    assert "--include" not in downloads(equal)["some/model"]


def test_the_autoscaler_is_enabled_only_for_scaling_pools() -> None:
    fixed = yaml.safe_load(rendered(config(), "c.yaml")["rayservice.yaml"])["spec"]["rayClusterConfig"]
    assert "enableInTreeAutoscaling" not in fixed
    scaling = config(draft={"replicas": {"min": 1, "max": 2}})
    found = yaml.safe_load(rendered(scaling, "c.yaml")["rayservice.yaml"])["spec"]["rayClusterConfig"]
    assert found["enableInTreeAutoscaling"] is True


def test_the_command_writes_next_to_the_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "overlays" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "kustomization.yaml").touch()
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(PLAIN))
    result = CliRunner().invoke(app, ["k8s", "render", str(file), "--set", "kubernetes.components=[monitoring]"])
    assert result.exit_code == 0
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization["components"] == ["../../components/monitoring"]
    assert "slipstream k8s render mine.yaml" in (folder / "rayservice.yaml").read_text()


@pytest.mark.parametrize("name", ["models.yaml", "rayservice.yaml", "kustomization.yaml"])
def test_a_configuration_is_not_overwritten_by_a_manifest(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(yaml.safe_dump(PLAIN))
    result = CliRunner().invoke(app, ["k8s", "render", str(file)])
    assert isinstance(result.exception, ConfigError)
    assert "rename it, or set --out" in str(result.exception)
    assert yaml.safe_load(file.read_text()) == PLAIN
    assert not (tmp_path / "base").exists()
    assert CliRunner().invoke(app, ["k8s", "render", str(file), "--out", str(tmp_path / "out")]).exit_code == 0


def test_outside_the_repository_the_folder_is_self_contained(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(PLAIN))
    out = tmp_path / "manifests"
    command = ["k8s", "render", str(file), "--out", str(out), "--set", "kubernetes.components=[monitoring]"]
    assert CliRunner().invoke(app, command).exit_code == 0
    kustomization = yaml.safe_load((out / "kustomization.yaml").read_text())
    assert kustomization["resources"] == ["base", "models.yaml", "rayservice.yaml"]
    assert kustomization["components"] == ["components/monitoring"]
    for part in ("base", "components/monitoring"):
        listed = yaml.safe_load((out / part / "kustomization.yaml").read_text())
        assert all((out / part / name).exists() for name in listed["resources"])
    assert not (out / "components" / "certificates").exists()
