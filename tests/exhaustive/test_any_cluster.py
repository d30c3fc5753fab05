"""The commands examine, deploy to, change and clean up an existing Ray cluster of several nodes."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray.cluster_utils import Cluster

from cluster.config import load_config
from cluster.routing.membership import Members
from cluster.routing.ray_membership import ServeMembership
from serve_app.operations.deploying import is_running, serve_details
from serve_app.operations.local import checked_port
from serve_app.operations.node_drain import RAY_DRAIN
from serve_app.operations.ray_cluster import broadcast, connected, deployed
from tests.unit.tools.drafts.eval.tiny_target import a_target
from tools.doctor.checks import run_checks
from tools.doctor.probe import examine

STORE_BYTES = 80 << 20
COMMAND_S = 400
SLIPSTREAM = (sys.executable, "-c", "from tools.cli import main; main()")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Starts three nodes with an operator's labels; routers run on the head."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ[RAY_DRAIN] = "60"
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for pool in ("target", "draft"):
        cluster.add_node(num_cpus=1, labels={"pool": pool}, object_store_memory=STORE_BYTES)
        os.environ["RAY_NODE_ZONE"] = "a-zone"  # of the second node
    del os.environ["RAY_NODE_ZONE"]
    cluster.wait_for_nodes()
    yield cluster
    del os.environ[RAY_DRAIN]
    cluster.shutdown()


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("any_cluster")
    resources = {"num_cpus": 0.5}
    content = {
        "model": {"target": str(a_target(folder / "tiny")), "dtype": "float32", "max_context": 128},
        "target": {"resources_per_rank": {**resources, "labels": {"pool": "target"}}, "max_sessions": 2},
        "draft": {"method": "ngram", "resources": {**resources, "labels": {"pool": "draft"}}},
        "server": {"port": checked_port("127.0.0.1", 0)},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def slipstream(cluster: Cluster, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*SLIPSTREAM, *map(str, arguments), "--address", cluster.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)


def url_of(config_file: Path) -> str:
    return f"http://127.0.0.1:{load_config(config_file).server.port}"


def answer(config_file: Path) -> str:
    asked = {"model": "tiny", "prompt": "abcabcabcabc", "max_tokens": 12, "temperature": 0}
    response = httpx.post(f"{url_of(config_file)}/v1/completions", json=asked, timeout=60)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def application(cluster: Cluster) -> dict[str, Any]:
    with connected(cluster.address):
        output: dict[str, Any] = serve_details()["applications"]["slipstream"]
        return output


def published(cluster: Cluster) -> Members:
    """Returns the data that replicas publish to every router."""
    with connected(cluster.address):
        handles = [deployed(pool, "slipstream") for pool in ("Target", "Drafter")]
        for handle in handles:
            broadcast(handle, "inspect")  # the controller has sent its replicas to the handle
        return asyncio.run(ServeMembership(*handles).current())


def labels_of(deployment: dict[str, Any], nodes: dict[str, dict[str, str]]) -> set[str | None]:
    return {nodes[replica["node_id"]].get("pool") for replica in deployment["replicas"]}


def test_the_doctor_finds_nothing_wrong_and_leaves_nothing(cluster: Cluster, config_file: Path) -> None:
    examined = slipstream(cluster, "doctor", config_file)
    assert examined.returncode == 0, examined.stdout + examined.stderr
    assert "3 nodes" in examined.stdout
    assert "6 calls tried" in examined.stdout
    with connected(cluster.address):
        assert not is_running()
        assert ray.util.list_named_actors(all_namespaces=True) == []


def test_the_doctor_names_faults_by_node(cluster: Cluster, config_file: Path) -> None:
    """The faults are missing models, an occupied HTTP port, a pool without capacity, and a truncated drain."""
    port = load_config(config_file).server.port
    wrong = ("model.target=/no/such/folder", "target.tensor_parallel=3", "target.drain_s=40")
    overrides = [word for key in wrong for word in ("--set", key)]
    with socket.create_server(("127.0.0.1", port)):
        examined = slipstream(cluster, "doctor", config_file, *overrides)
    assert examined.returncode == 1, examined.stdout + examined.stderr
    output = examined.stdout
    assert "there is no model folder /no/such/folder" in output
    assert f"cannot listen on 127.0.0.1:{port}" in output
    assert output.count("Ray drains the node for 60 s, but its replicas may take 65 s") == 3
    assert "a target replica needs 1.6 CPU on one node with pool=target, but no node has more than 1 CPU" in output


def test_nodes_call_each_other_with_the_credentials_of_replicas(cluster: Cluster, config_file: Path) -> None:
    """Servers cannot start without their credential files, so the doctor reports a missing one for each node."""
    config = load_config(config_file, ["trust.token_file=no_such_file"])
    checks = {check.name: check for check in run_checks(config, examine(config, cluster.address))}
    assert len(checks["gRPC"].faults) == 3
    assert all("trust.token_file: cannot read" in fault for fault in checks["gRPC"].faults)


def test_an_unschedulable_configuration_is_refused_before_startup(cluster: Cluster, config_file: Path) -> None:
    refused = slipstream(cluster, "up", config_file, "--set", "draft.resources.labels={pool: drafts}")
    assert refused.returncode == 2
    assert "a drafter needs a node with pool=drafts, but none of 3 nodes has them" in refused.stderr
    assert "existing labels: pool=draft, pool=target" in refused.stderr
    with connected(cluster.address):
        assert not is_running()


def test_models_that_do_not_fit_are_refused_before_anything_starts(cluster: Cluster, config_file: Path) -> None:
    refused = slipstream(cluster, "up", config_file, "--set", "model.target=/no/such/folder")
    assert refused.returncode == 2
    assert "there is no model folder /no/such/folder" in refused.stderr
    with connected(cluster.address):
        assert not is_running()


def test_up_updates_a_deployment_and_down_removes_it(cluster: Cluster, config_file: Path) -> None:
    put_up = slipstream(cluster, "up", config_file)
    assert put_up.returncode == 0, put_up.stderr
    assert put_up.stdout == f"Slipstream is up: {url_of(config_file)}/v1 (model tiny)\n"
    text = answer(config_file)
    with connected(cluster.address):
        nodes = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    deployments = application(cluster)["deployments"]
    assert labels_of(deployments["Target"], nodes) == {"target"}
    assert labels_of(deployments["Drafter"], nodes) == {"draft"}

    (drafter,) = published(cluster).drafters
    assert (nodes[drafter.node].get("pool"), drafter.zone) == ("draft", "a-zone")
    (target,) = published(cluster).targets
    assert (nodes[target.node].get("pool"), target.zone) == ("target", "")

    same = slipstream(cluster, "up", config_file)
    assert same.returncode == 0, same.stderr
    assert published(cluster).targets == (target,), "nothing has changed, so nothing is restarted"

    changed = slipstream(cluster, "up", config_file, "--set", "speculation.draft_tokens=2")
    assert changed.returncode == 0, changed.stderr
    assert application(cluster)["deployed_app_config"]["args"]["speculation"] == {"draft_tokens": 2}
    assert answer(config_file) == text
    examined = slipstream(cluster, "doctor", config_file)
    assert examined.returncode == 0, f"its own port is no fault of Serve's:\n{examined.stdout}"

    taken = slipstream(cluster, "down", config_file)
    assert (taken.returncode, taken.stdout) == (0, "Slipstream is down\n"), taken.stderr
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url_of(config_file)}/health")
    again = slipstream(cluster, "down")
    assert again.returncode == 2
    assert "no slipstream is deployed" in again.stderr
    with connected(cluster.address):
        assert not is_running()
        assert ray.util.list_named_actors(all_namespaces=True) == []
