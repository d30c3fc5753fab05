"""Examination of a running Ray cluster: starts a probe on every node and collects the findings."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import SlipstreamConfig
from serve_app.operations.capacity_check import Node, needs
from serve_app.operations.deploying import is_running
from serve_app.operations.ray_cluster import alive_nodes, connected
from tools.doctor.checks import models_needed
from tools.doctor.facts import ClockReading, ClusterFacts, NodeFacts, ProbeCall
from tools.doctor.probe import NodeProbe

K = TypeVar("K")

LOOK_S = 180.0  # for all nodes together; mostly spent reading a model's files from a hub
CALL_S = 60.0
CLOCK_S = 10.0
CLOCK_QUESTIONS = 5
MOST_CALLED = 7  # nodes that one node calls: in a large cluster not every pair is tried


def examine(config: SlipstreamConfig, address: str) -> ClusterFacts:
    """Examines the cluster and leaves nothing behind. Raises ClusterError if it cannot be reached."""
    with connected(address):
        nodes = tuple(alive_nodes())
        probes = {node.node_id: _probe(config, node) for node in nodes}
        router = needs(config)[-1]
        tries_ports = not is_running()  # otherwise Serve itself listens there
        looks = {
            node.node_id: probes[node.node_id].look.remote(
                tries_port=tries_ports and router.fits(node), models=models_needed(config, node)
            )
            for node in nodes
        }
        found, silent = _answers(looks, LOOK_S)
        calls = _call(probes, found)
        clocks = [_clock(node_id, probes[node_id]) for node_id in found]
        return ClusterFacts(nodes, tuple(found.values()), silent, calls, tuple(clocks))


def _probe(config: SlipstreamConfig, node: Node) -> Any:
    return (
        ray.remote(NodeProbe)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False))
        .remote(config, node)
    )


def _answers(asked: Mapping[K, Any], within_s: float) -> tuple[dict[K, Any], dict[K, str]]:
    """Returns the answers, and the reasons for those that are missing, by the same keys."""
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=within_s)
    answered: dict[K, Any] = {}
    silent: dict[K, str] = {}
    for key, reference in asked.items():
        try:
            answered[key] = ray.get(reference, timeout=0)
        except (RayError, TimeoutError) as error:
            silent[key] = str(error).strip().splitlines()[-1] if str(error) else f"no answer in {within_s:.0f} s"
    return answered, silent


def _call(probes: Mapping[str, Any], found: Mapping[str, NodeFacts]) -> tuple[ProbeCall, ...]:
    serving = [facts for facts in found.values() if facts.server is not None]
    asked = {
        (caller.node.node_id, called.node.node_id): probes[caller.node.node_id].call.remote(
            called.node.node_id, called.server, called.server_role
        )
        for caller, called in pairs(serving)
    }
    if not asked:
        return ()
    answered, silent = _answers(asked, CALL_S)
    lost = [ProbeCall(caller, called, None, why) for (caller, called), why in silent.items()]
    return (*answered.values(), *lost)


def pairs(nodes: Sequence[NodeFacts]) -> Iterator[tuple[NodeFacts, NodeFacts]]:
    """Yields callers and callees: all pairs of nodes, or in a large cluster each node with the next few."""
    count = len(nodes)
    for index, caller in enumerate(nodes):
        for step in range(1, min(count - 1, MOST_CALLED) + 1):
            yield caller, nodes[(index + step) % count]


def _clock(node_id: str, probe: Any) -> ClockReading:
    """Reads a node's clock several times and keeps the reading with the shortest round trip."""
    best = ClockReading(node_id, 0.0, float("inf"))
    for _ in range(CLOCK_QUESTIONS):
        began = time.time()
        theirs: float = ray.get(probe.clock.remote(), timeout=CLOCK_S)
        ended = time.time()
        if ended - began < 2 * best.error_s:
            best = ClockReading(node_id, theirs - (began + ended) / 2, (ended - began) / 2)
    return best
