"""The gRPC servers of drafter and target, which turn streams into calls on the replica."""

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from actors.drafter import Drafter
from actors.net.auth_interceptor import AuthInterceptor, Context
from actors.net.credentials import SERVER_OPTIONS, credentials_of
from actors.net.streams import converse, read_hello
from actors.target import TargetReplica
from cluster.config_sections import TrustConfig
from cluster.trust import PeerRole, Refusals
from protos import speculation_pb2 as pb
from protos.speculation_pb2_grpc import (
    DraftServiceServicer,
    TargetServiceServicer,
    add_DraftServiceServicer_to_server,
    add_TargetServiceServicer_to_server,
)

TRUST = TrustConfig()  # default credentials: listen on loopback only


class TargetServicer(TargetServiceServicer):
    """Streams of a target replica."""

    def __init__(self, replica: TargetReplica, gate: AuthInterceptor) -> None:
        self._replica = replica
        self._gate = gate

    async def Drive(self, _: Any, context: Context) -> None:
        async with self._gate.stream(context, PeerRole.ROUTER):
            replica = self._replica
            hello = await read_hello(context, replica.vocabulary, replica.target_model)
            stream, outbox = replica.router_up(hello)
            try:
                await converse(context, pb.TargetToRouter, outbox, lambda frame: replica.receive(stream, frame))
            finally:
                replica.stream_down(stream)

    async def Verify(self, _: Any, context: Context) -> None:
        async with self._gate.stream(context, PeerRole.DRAFTER):
            replica = self._replica
            hello = await read_hello(context, replica.vocabulary, replica.target_model)
            stream, outbox = replica.drafter_up(hello)
            try:
                await converse(context, pb.TargetToDrafter, outbox, lambda frame: replica.receive(stream, frame))
            finally:
                replica.stream_down(stream)

    async def States(self, _: Any, context: Context) -> None:
        async with self._gate.stream(context, PeerRole.DRAFTER):
            replica = self._replica
            hello = await read_hello(context, replica.vocabulary, replica.target_model)
            stream, outbox = replica.states_up(hello)
            try:
                await converse(context, pb.TargetToDrafterStates, outbox, lambda frame: replica.receive(stream, frame))
            finally:
                replica.states_down(stream, outbox)


class DraftServicer(DraftServiceServicer):
    """Streams of a drafter."""

    def __init__(self, drafter: Drafter, gate: AuthInterceptor) -> None:
        self._drafter = drafter
        self._gate = gate

    async def Drive(self, _: Any, context: Context) -> None:
        async with self._gate.stream(context, PeerRole.ROUTER):
            drafter = self._drafter
            hello = await read_hello(context, drafter.vocabulary, drafter.target_model)
            stream, outbox = drafter.router_up(hello)
            try:
                await converse(context, pb.DrafterToRouter, outbox, lambda frame: drafter.receive(stream, frame))
            finally:
                drafter.router_down(stream)


class GrpcServer:
    """A started server; `address` is what peers dial."""

    def __init__(self, server: grpc.aio.Server, address: str, gate: AuthInterceptor) -> None:
        self._server = server
        self.address = address
        self.gate = gate

    async def stop(self, grace_s: float = 0.5) -> None:
        await self._server.stop(grace_s)


async def serve_target(replica: TargetReplica, host: str, port: int = 0, trust: TrustConfig = TRUST) -> GrpcServer:
    """Starts a target's server; port 0 takes a free one."""
    return await _start(
        PeerRole.TARGET,
        "slipstream.v1.TargetService",
        lambda server, gate: add_TargetServiceServicer_to_server(TargetServicer(replica, gate), server),
        replica.refusals,
        host,
        port,
        trust,
    )


async def serve_drafter(drafter: Drafter, host: str, port: int = 0, trust: TrustConfig = TRUST) -> GrpcServer:
    """Starts a drafter's server; port 0 takes a free one."""
    return await _start(
        PeerRole.DRAFTER,
        "slipstream.v1.DraftService",
        lambda server, gate: add_DraftServiceServicer_to_server(DraftServicer(drafter, gate), server),
        drafter.refusals,
        host,
        port,
        trust,
    )


async def _start(
    role: PeerRole,
    service: str,
    add: Callable[[grpc.aio.Server, AuthInterceptor], None],
    refusals: Refusals,
    host: str,
    port: int,
    trust: TrustConfig,
) -> GrpcServer:
    credentials = credentials_of(trust, role)
    gate = AuthInterceptor(credentials, refusals, trust.max_streams_per_host)
    server = grpc.aio.server(interceptors=[gate], options=SERVER_OPTIONS)
    add(server, gate)
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    if trust.reflection:
        reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = credentials.listen(server, host, port, gate.handshakes.begins)
    await server.start()
    await checker.set(service, health_pb2.HealthCheckResponse.SERVING)
    return GrpcServer(server, f"{host}:{bound}", gate)
