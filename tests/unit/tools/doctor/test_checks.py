"""Every finding names the node, the problem and the remedy."""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from ray._private import ray_constants

from cluster.config import SlipstreamConfig, validated
from cluster.trust import PeerRole
from serve_app.operations.checks import Node
from serve_app.operations.node_drain import RAY_DRAIN
from tools.doctor.checks import (
    ClockReading,
    ClusterFacts,
    ModelsNeeded,
    NodeFacts,
    ProbeCall,
    models_needed,
    run_checks,
)
from tools.doctor.probe import pairs, ray_auth, ray_drain_s

VERSIONS = {
    "python": "3.11.9",
    "ray": "2.60.0",
    "torch": "2.9.0+cpu",
    "transformers": "5.1.0",
    "slipstream": "0.1.0",
    "protocol": "6",
}
GIB = 1 << 30


def config(**sections: Any) -> SlipstreamConfig:
    return validated({"model": {"target": "t"}, "draft": {"method": "ngram"}} | sections)


def found(name: str, **differs: Any) -> NodeFacts:
    node = Node(name * 20, f"10.0.0.{name}", {"CPU": 4.0, "object_store_memory": float(GIB)}, {})
    facts = NodeFacts(node, VERSIONS, 2 * GIB, None, None, f"10.0.0.{name}:50051", PeerRole.TARGET, None, 55.0, "token")
    return replace(facts, **differs)


def cluster(*nodes: NodeFacts, **differs: Any) -> ClusterFacts:
    nodes = nodes or (found("1"), found("2"))
    clocks = tuple(ClockReading(one.node.node_id, 0.001, 0.001) for one in nodes)
    facts = ClusterFacts(tuple(one.node for one in nodes), nodes, {}, (), clocks)
    return replace(facts, **differs)


def faults(facts: ClusterFacts, settings: SlipstreamConfig | None = None) -> dict[str, tuple[str, ...]]:
    return {check.name: check.faults for check in run_checks(settings or config(), facts) if check.faults}


def test_a_complete_cluster_has_no_fault() -> None:
    calls = (ProbeCall("1" * 20, "2" * 20, 0.001, None), ProbeCall("2" * 20, "1" * 20, 0.002, None))
    assert faults(cluster(calls=calls)) == {}


def test_the_kind_of_pair_is_reported_once() -> None:
    nodes = [found(name, pairing="pair: same vocabulary") for name in "12"]
    (line,) = [check.seen for check in run_checks(config(), cluster(*nodes)) if check.name == "models"]
    assert line == "read on 2 nodes; pair: same vocabulary"


@pytest.mark.parametrize("what", sorted(VERSIONS))
def test_different_versions_are_named_with_their_nodes(what: str) -> None:
    (line,) = faults(cluster(found("1"), found("2", versions=VERSIONS | {what: "other"})))["versions"]
    assert line.startswith(f"{what} differs: {VERSIONS[what]} on 10.0.0.1; other on 10.0.0.2; install equal versions")


def test_a_cpu_build_of_torch_on_a_gpu_node_is_a_fault() -> None:
    one = found("1")
    gpu = replace(one, node=replace(one.node, resources={**one.node.resources, "GPU": 1.0}))
    (line,) = faults(cluster(gpu, found("2")))["versions"]
    assert line.startswith("10.0.0.1 has GPUs, but torch 2.9.0+cpu only supports CPUs")


def test_an_unresponsive_node_is_named_with_the_reason() -> None:
    one, two = found("1"), found("2")
    facts = cluster(one, nodes=(one.node, two.node), silent={two.node.node_id: "No module named 'serve_app'"})
    assert faults(facts) == {
        "nodes": (
            "10.0.0.2 could not be examined: No module named 'serve_app'; install this version of Slipstream there",
        )
    }


def test_a_pool_that_fits_nowhere_is_a_resource_fault() -> None:
    (line,) = faults(cluster(), config(target={"resources_per_rank": {"num_gpus": 1}}))["resources"]
    assert "no node has more than 0 GPU" in line


def test_closed_ports_and_missing_models_are_named_by_node() -> None:
    node = found("2", port_fault="server.port: cannot listen on 0.0.0.0:8000", model_fault="there is no model folder")
    reported = faults(cluster(found("1"), node))
    assert reported["HTTP port"][0].startswith("10.0.0.2: server.port: cannot listen")
    assert reported["models"] == ("10.0.0.2: there is no model folder (replicas may run on this node)",)


def test_a_node_needs_the_models_of_its_possible_replicas() -> None:
    asked = {"labels": {"pool": "target"}}
    apart = {
        "target": {"resources_per_rank": asked},
        "draft": {"model": "d", "resources": {"labels": {"pool": "draft"}}},
    }
    offered = {"CPU": 2.0}
    drafts, targets, neither = ({"pool": "draft"}, {"pool": "target"}, {})
    whole = config(**apart)
    assert models_needed(whole, Node("n", "a", offered, drafts)) is ModelsNeeded.BOTH
    assert models_needed(whole, Node("n", "a", offered, targets)) is ModelsNeeded.TARGET
    assert models_needed(whole, Node("n", "a", offered, neither)) is ModelsNeeded.TARGET, "a router may run there"
    assert models_needed(whole, Node("n", "a", {}, drafts)) is ModelsNeeded.NONE
    head = config(**apart | {"draft": apart["draft"] | {"method": "eagle"}})
    assert models_needed(head, Node("n", "a", offered, targets)) is ModelsNeeded.BOTH


def test_shared_memory_must_hold_the_object_store_and_the_ranks() -> None:
    (store,) = faults(cluster(found("1", shared_memory=64 << 20)))["shared memory"]
    assert "has 64 MiB in /dev/shm, but Ray's object store of 1024 MiB" in store
    assert len(faults(cluster(found("1", shared_memory=GIB - 1)))["shared memory"]) == 1
    tight = cluster(found("1", shared_memory=GIB + (100 << 20)))
    assert faults(tight) == {}, "one rank needs none"
    (ranks,) = faults(tight, config(target={"tensor_parallel": 2}))["shared memory"]
    assert "2 ranks of a target need another 128 MiB" in ranks


def test_rays_drain_time_must_cover_the_configured_one() -> None:
    """The default minimum is 55 s: 30 s of drain, 10 s to end, and 15 s until Serve notices."""
    facts = cluster(found("1"), found("2", ray_drain_s=54.0))
    (line,) = faults(facts)["drain"]
    assert line.startswith("10.0.0.2: Ray drains the node for 54 s, but its replicas may")
    assert line.endswith(f"start the node with {RAY_DRAIN}=55 ray start --block")
    assert faults(facts, config(target={"drain_s": 29}, server={"drain_s": 29})) == {}
    assert len(faults(facts, config(target={"drain_s": 31}))["drain"]) == 2
    assert len(faults(facts, config(server={"drain_s": 30.5}))["drain"]) == 2


def test_a_node_without_replicas_needs_no_drain_time() -> None:
    head = found("2", ray_drain_s=0.0)
    bare = replace(head, node=replace(head.node, resources={"object_store_memory": float(GIB)}))
    assert len(faults(cluster(found("1"), head))["drain"]) == 1
    assert faults(cluster(found("1"), bare)) == {}


def test_the_default_drain_time_is_rays() -> None:
    assert ray_drain_s({RAY_DRAIN: "120"}) == 120
    assert ray_drain_s({RAY_DRAIN: "two minutes"}) == ray_drain_s({}) == 30
    assert ray_drain_s(os.environ) == ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S


def test_ray_needs_a_token_on_several_machines() -> None:
    open_ports = cluster(found("1"), found("2", ray_auth=ray_auth({})))
    (line,) = faults(open_ports)["Ray's token"]
    assert line.startswith("10.0.0.2: Ray requires no token (RAY_AUTH_MODE is disabled), so any client of its ports")
    assert faults(open_ports, config(trust={"insecure": True})) == {}, "the network is trusted"
    assert faults(cluster(found("1", ray_auth="disabled"))) == {}, "one machine"
    one, two = (found(name, ray_auth="disabled") for name in "12")
    assert faults(cluster(one, replace(two, node=replace(two.node, address=one.node.address)))) == {}, "still one"
    assert ray_auth({"RAY_AUTH_MODE": "Token"}) == "token"


def test_failed_and_slow_calls_are_named_with_both_nodes() -> None:
    ends = ("1" * 20, "2" * 20)
    (failed,) = faults(cluster(calls=(ProbeCall(*ends, None, "UNAVAILABLE: refused"),)))["gRPC"]
    assert failed.startswith("gRPC call from 10.0.0.1 to 10.0.0.2 failed: UNAVAILABLE: refused; ")
    (slow,) = faults(cluster(calls=(ProbeCall(*ends, 0.05, None),)))["gRPC"]
    assert "takes 50 ms for the round trip" in slow
    (none,) = faults(cluster(found("1"), found("2", server=None, server_fault="no token")))["gRPC"]
    assert none == "10.0.0.2: a gRPC server cannot start: no token"


def test_a_wrong_clock_is_one_finding() -> None:
    right = [ClockReading(name * 20, 3.0, 0.001) for name in "12"]
    nodes = (found("1"), found("2"), found("3"))
    (line,) = faults(cluster(*nodes, clocks=(*right, ClockReading("3" * 20, 2.5, 0.001))))["clocks"]
    assert line.startswith("10.0.0.3: its clock is 0.50 s behind the other clocks")
    assert faults(cluster(*nodes, clocks=(*right, ClockReading("3" * 20, 2.5, 0.5)))) == {}


def test_nodes_with_one_address_are_distinguished() -> None:
    one, two = found("1"), found("2")
    shared = replace(two, node=replace(two.node, address="10.0.0.1"), versions=VERSIONS | {"ray": "2.61.0"})
    (line,) = faults(cluster(one, shared))["versions"]
    assert "2.61.0 on 10.0.0.1 (22222222)" in line


def test_all_pairs_are_probed_in_small_clusters() -> None:
    few = [found(str(name)) for name in range(1, 5)]
    assert len({(a.node.node_id, b.node.node_id) for a, b in pairs(few)}) == 4 * 3
    many = [found(str(name)) for name in range(1, 21)]
    tried = list(pairs(many))
    calls = Counter(caller.node.node_id for caller, _ in tried)
    assert calls == Counter(called.node.node_id for _, called in tried)
    assert len(calls) == 20
    assert len(set(calls.values())) == 1
    assert 20 < len(tried) < 20 * 19
    assert all(a is not b for a, b in tried)
    assert list(pairs(few[:1])) == []
