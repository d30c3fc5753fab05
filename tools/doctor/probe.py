"""Examines a running Ray cluster: starts a probe on every node and collects the facts.

A probe is a Ray actor that reserves no resources and examines its own node.
"""

import asyncio
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, TypeVar

import grpc
import ray
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.net.auth_interceptor import AuthInterceptor
from actors.net.credentials import Credentials, credentials_of
from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError, SlipstreamError
from cluster.trust import PeerRole, Refusals
from protos.messages import PROTOCOL_VERSION
from serve_app.operations.checks import Node, needs
from serve_app.operations.deploying import is_running
from serve_app.operations.local import checked_port
from serve_app.operations.node_drain import RAY_DRAIN, RAY_DRAIN_DEFAULT_S
from serve_app.operations.ray_cluster import alive_nodes, connected
from serve_app.startup import listening_host
from tools.doctor.checks import ClockReading, ClusterFacts, ModelsNeeded, NodeFacts, ProbeCall, models_needed

log = logging.getLogger(__name__)

DIAL_S = 5.0
CALLS = 5  # number of calls per pair; the fastest counts, since load slows calls
DISTRIBUTIONS = {"ray": "ray", "torch": "torch", "transformers": "transformers", "slipstream": "slipstream-serving"}
SERVING_ROLES = (PeerRole.TARGET, PeerRole.DRAFTER, PeerRole.ROUTER)  # tried in this order


class NodeProbe:
    """Ray actor that examines its node."""

    def __init__(self, config: SlipstreamConfig, node: Node) -> None:
        self._config = config
        self._node = node
        self._role = PeerRole.TARGET
        self._credentials: Credentials | None = None
        self._server: grpc.aio.Server | None = None

    async def look(self, tries_port: bool, models: ModelsNeeded) -> NodeFacts:
        """Collects the facts about this node, and starts the trial server."""
        server: str | None = None
        server_fault: str | None = None
        try:
            server = await self._serve()
        except (SlipstreamError, RuntimeError, OSError) as error:
            server_fault = str(error)
        model_fault, pairing = await asyncio.to_thread(self._models, models)
        return NodeFacts(
            self._node,
            versions(),
            shared_memory_bytes(),
            self._port_fault() if tries_port else None,
            model_fault,
            server,
            self._role,
            server_fault,
            ray_drain_s(os.environ),
            ray_auth(os.environ),
            pairing,
        )

    async def clock(self) -> float:
        return time.time()

    async def call(self, called: str, address: str, role: PeerRole) -> ProbeCall:
        """Measures calls to the health service of another node's trial server."""
        if self._credentials is None:
            return ProbeCall(self._node.node_id, called, None, "the caller has no credentials")
        channel = self._credentials.dial(address, role)
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            times = []
            for _ in range(CALLS):
                began = time.perf_counter()
                await check(
                    health_pb2.HealthCheckRequest(), timeout=DIAL_S, metadata=self._credentials.metadata or None
                )
                times.append(time.perf_counter() - began)
            return ProbeCall(self._node.node_id, called, min(times), None)
        except grpc.aio.AioRpcError as error:
            return ProbeCall(self._node.node_id, called, None, f"{error.code().name}: {error.details()}")
        finally:
            await channel.close()

    async def _serve(self) -> str:
        """Starts a server like a replica's, with the same bind address and credentials."""
        trust = self._config.trust
        self._role, self._credentials = self._own_credentials()
        gate = AuthInterceptor(self._credentials, Refusals(log), trust.max_streams_per_host)
        self._server = grpc.aio.server(interceptors=[gate])
        checker = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checker, self._server)
        host = listening_host(trust)
        port = self._credentials.listen(self._server, host, 0)
        await self._server.start()
        await checker.set("", health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{port}"

    def _own_credentials(self) -> tuple[PeerRole, Credentials]:
        """Returns the first role with credentials, since a pod may have only one role's certificate.

        Raises ConfigError if no role has credentials.
        """
        reason = ""
        for role in SERVING_ROLES:
            try:
                return role, credentials_of(self._config.trust, role)
            except ConfigError as error:
                reason = reason or str(error)
        raise ConfigError(reason)

    def _port_fault(self) -> str | None:
        server = self._config.server
        try:
            checked_port(server.host, server.port)
        except ConfigError as error:
            return str(error)
        return None

    def _models(self, models: ModelsNeeded) -> tuple[str | None, str]:
        """Checks the models; returns the error, if any, and how the draft's tokens become the target's."""
        if models is ModelsNeeded.NONE:
            return None, ""
        from serve_app.operations.preflight import PAIR, check_models

        try:
            lines = check_models(self._config, with_weights=False, with_draft=models is ModelsNeeded.BOTH)
        except (SlipstreamError, OSError, ValueError) as error:  # transformers raises OSError and ValueError
            return str(error), ""
        return None, next((line for line in lines if line.startswith(PAIR)), "")


def versions() -> dict[str, str]:
    """Returns the versions of Python, packages and protocol on this node."""
    found = {name: _version(distribution) for name, distribution in DISTRIBUTIONS.items()}
    return {"python": platform.python_version(), **found, "protocol": str(PROTOCOL_VERSION)}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def shared_memory_bytes() -> int:
    """Returns the size of /dev/shm in bytes; 0 if there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except FileNotFoundError:
        return 0
    return status.f_frsize * status.f_blocks


def ray_drain_s(environ: Mapping[str, str]) -> float:
    """Reads Ray's drain time in seconds from the environment of `ray start`, which all processes of a node inherit."""
    try:
        return float(environ.get(RAY_DRAIN, RAY_DRAIN_DEFAULT_S))
    except ValueError:
        return RAY_DRAIN_DEFAULT_S  # Ray's own fallback


def ray_auth(environ: Mapping[str, str]) -> str:
    """Reads Ray's authentication mode from the environment of `ray start`; a head with a token sets the mode itself."""
    return environ.get("RAY_AUTH_MODE", "disabled").lower()


K = TypeVar("K")

LOOK_S = 180.0  # seconds for all nodes, mostly for downloading a model's files
CALL_S = 60.0
CLOCK_S = 10.0
CLOCK_QUESTIONS = 5
MAX_CALLED_NODES = 7  # maximum nodes called by each node, since a large cluster has too many pairs


def examine(config: SlipstreamConfig, address: str) -> ClusterFacts:
    """Examines the cluster and removes the probes. Raises ClusterError if the cluster cannot be reached."""
    with connected(address):
        nodes = tuple(alive_nodes())
        probes = {node.node_id: _probe(config, node) for node in nodes}
        router = needs(config)[-1]
        tries_ports = not is_running()  # a running Serve already listens there
        pending = {
            node.node_id: probes[node.node_id].look.remote(
                tries_port=tries_ports and router.fits(node), models=models_needed(config, node)
            )
            for node in nodes
        }
        found, silent = _answers(pending, LOOK_S)
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
    """Returns the answers by key, and the errors of missing answers by key."""
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
    """Yields (caller, callee) pairs: all pairs of nodes or, in a large cluster, each node with a few others."""
    count = len(nodes)
    for index, caller in enumerate(nodes):
        for step in range(1, min(count - 1, MAX_CALLED_NODES) + 1):
            yield caller, nodes[(index + step) % count]


def _clock(node_id: str, probe: Any) -> ClockReading:
    """Reads a node's clock several times, and keeps the reading with the shortest round trip."""
    best = ClockReading(node_id, 0.0, float("inf"))
    for _ in range(CLOCK_QUESTIONS):
        began = time.time()
        theirs: float = ray.get(probe.clock.remote(), timeout=CLOCK_S)
        ended = time.time()
        if ended - began < 2 * best.error_s:
            best = ClockReading(node_id, theirs - (began + ended) / 2, (ended - began) / 2)
    return best
