"""Probe of one node: a Ray actor that reserves no resources and examines the node from inside."""

import asyncio
import logging
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from actors.transport.auth_interceptor import Gate
from actors.transport.credentials import Credentials, credentials_of
from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError, SlipstreamError
from cluster.trust.refusals import Refusals
from cluster.trust.roles import PeerRole
from protos.messages import PROTOCOL_VERSION
from serve_app.bind_address import listening_host
from serve_app.operations.capacity_check import Node
from serve_app.operations.draining import RAY_DRAIN, RAY_DRAINS_S
from serve_app.operations.local import checked_port
from tools.doctor.facts import ModelsNeeded, NodeFacts, ProbeCall

log = logging.getLogger(__name__)

DIAL_S = 5.0
CALLS = 5  # the fastest counts: load on a machine is not distance
DISTRIBUTIONS = {"ray": "ray", "torch": "torch", "transformers": "transformers", "slipstream": "slipstream-serving"}
SERVING_ROLES = (PeerRole.TARGET, PeerRole.DRAFTER, PeerRole.ROUTER)  # tried in this order


class NodeProbe:
    """Examines one node."""

    def __init__(self, config: SlipstreamConfig, node: Node) -> None:
        self._config = config
        self._node = node
        self._role = PeerRole.TARGET
        self._credentials: Credentials | None = None
        self._server: grpc.aio.Server | None = None

    async def look(self, tries_port: bool, models: ModelsNeeded) -> NodeFacts:
        """Collects all facts that involve no other node; starts the trial server."""
        server: str | None = None
        server_fault: str | None = None
        try:
            server = await self._serve()
        except (SlipstreamError, RuntimeError, OSError) as error:
            server_fault = str(error)
        model_fault = await asyncio.to_thread(self._model_fault, models)
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
        )

    async def clock(self) -> float:
        return time.time()

    async def call(self, called: str, address: str, role: PeerRole) -> ProbeCall:
        """Calls the health service of another node's trial server."""
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
        """Starts a server as replicas do, with the same bind address and credentials."""
        trust = self._config.trust
        self._role, self._credentials = self._own_credentials()
        gate = Gate(self._credentials, Refusals(log), trust.max_streams_per_host)
        self._server = grpc.aio.server(interceptors=[gate])
        checker = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checker, self._server)
        host = listening_host(trust)
        port = self._credentials.listen(self._server, host, 0)
        await self._server.start()
        await checker.set("", health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{port}"

    def _own_credentials(self) -> tuple[PeerRole, Credentials]:
        """Returns the first role with credentials; a pod may have the certificate of one role only.

        Raises ConfigError if there are none.
        """
        lacking = ""
        for role in SERVING_ROLES:
            try:
                return role, credentials_of(self._config.trust, role)
            except ConfigError as error:
                lacking = lacking or str(error)
        raise ConfigError(lacking)

    def _port_fault(self) -> str | None:
        server = self._config.server
        try:
            checked_port(server.host, server.port)
        except ConfigError as error:
            return str(error)
        return None

    def _model_fault(self, models: ModelsNeeded) -> str | None:
        if models is ModelsNeeded.NONE:
            return None
        from serve_app.operations.preflight import check_models

        try:
            check_models(self._config, with_weights=False, with_draft=models is ModelsNeeded.BOTH)
        except (SlipstreamError, OSError, ValueError) as error:  # transformers raises the last two
            return str(error)
        return None


def versions() -> dict[str, str]:
    """Returns the versions of this node's installation."""
    found = {name: _version(distribution) for name, distribution in DISTRIBUTIONS.items()}
    return {"python": platform.python_version(), **found, "protocol": str(PROTOCOL_VERSION)}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def shared_memory_bytes() -> int:
    """Returns the size of /dev/shm; 0 if there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except FileNotFoundError:
        return 0
    return status.f_frsize * status.f_blocks


def ray_drain_s(environ: Mapping[str, str]) -> float:
    """Reads Ray's drain time from the environment of `ray start`, which all processes of the node inherit."""
    try:
        return float(environ.get(RAY_DRAIN, RAY_DRAINS_S))
    except ValueError:
        return RAY_DRAINS_S  # Ray logs a warning and uses this default


def ray_auth(environ: Mapping[str, str]) -> str:
    """Reads Ray's authentication mode in the same way; a head that finds a token sets it itself."""
    return environ.get("RAY_AUTH_MODE", "disabled").lower()
