"""gRPC servers of drafters and targets; they translate streams into calls on the replica."""

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from actors.drafter import Drafter
from actors.net.auth_interceptor import AuthInterceptor, Context
from actors.net.credentials import SERVER_OPTIONS, credentials_of
from actors.net.streams import Outbox, converse, read_hello
from actors.target import TargetReplica
from cluster.config_sections import TrustConfig
from cluster.trust import PeerRole, Refusals
from protos import speculation_pb2 as pb
from protos.messages import Hello
from protos.speculation_pb2_grpc import (
    DraftServiceServicer,
    TargetServiceServicer,
    add_DraftServiceServicer_to_server,
    add_TargetServiceServicer_to_server,
)

TRUST = TrustConfig()  # default credentials: listen only on loopback


async def _serve_stream(
    replica: TargetReplica | Drafter,
    interceptor: AuthInterceptor,
    context: Context,
    role: PeerRole,
    reply_type: type[ProtoMessage],
    connect: Callable[[Hello], tuple[str, Outbox]],
    disconnect: Callable[[str, Outbox], None],
) -> None:
    """Serves one stream of a caller with this role, from the Hello to the end of the stream."""
    async with interceptor.stream(context, role):
        hello = await read_hello(context, replica.identities)
        stream, outbox = connect(hello)
        try:
            await converse(context, reply_type, outbox, lambda frame: replica.receive(stream, frame))
        finally:
            disconnect(stream, outbox)


class TargetServicer(TargetServiceServicer):
    """Serves a target replica's streams."""

    def __init__(self, replica: TargetReplica, interceptor: AuthInterceptor) -> None:
        self._replica = replica
        self._serve = partial(_serve_stream, replica, interceptor)

    async def Drive(self, _: Any, context: Context) -> None:
        replica = self._replica
        await self._serve(context, PeerRole.ROUTER, pb.TargetToRouter, replica.router_up, self._disconnect)

    async def Verify(self, _: Any, context: Context) -> None:
        replica = self._replica
        await self._serve(context, PeerRole.DRAFTER, pb.TargetToDrafter, replica.drafter_up, self._disconnect)

    async def States(self, _: Any, context: Context) -> None:
        replica = self._replica
        await self._serve(context, PeerRole.DRAFTER, pb.TargetToDrafterStates, replica.states_up, replica.states_down)

    def _disconnect(self, stream: str, _: Outbox) -> None:
        self._replica.stream_down(stream)


class DraftServicer(DraftServiceServicer):
    """Serves a drafter's streams."""

    def __init__(self, drafter: Drafter, interceptor: AuthInterceptor) -> None:
        self._drafter = drafter
        self._serve = partial(_serve_stream, drafter, interceptor)

    async def Drive(self, _: Any, context: Context) -> None:
        drafter = self._drafter
        await self._serve(
            context,
            PeerRole.ROUTER,
            pb.DrafterToRouter,
            drafter.router_up,
            lambda stream, _: drafter.router_down(stream),
        )


class GrpcServer:
    """A running server; peers dial its `address`."""

    def __init__(self, server: grpc.aio.Server, address: str, interceptor: AuthInterceptor) -> None:
        self._server = server
        self.address = address
        self.interceptor = interceptor

    async def stop(self, grace_s: float = 0.5) -> None:
        await self._server.stop(grace_s)


async def serve_target(replica: TargetReplica, host: str, port: int = 0, trust: TrustConfig = TRUST) -> GrpcServer:
    """Starts a target's server; port 0 selects a free port."""
    return await _start(
        PeerRole.TARGET,
        "slipstream.v1.TargetService",
        lambda server, interceptor: add_TargetServiceServicer_to_server(TargetServicer(replica, interceptor), server),
        replica.scheduler.refusals,
        host,
        port,
        trust,
    )


async def serve_drafter(drafter: Drafter, host: str, port: int = 0, trust: TrustConfig = TRUST) -> GrpcServer:
    """Starts a drafter's server; port 0 selects a free port."""
    return await _start(
        PeerRole.DRAFTER,
        "slipstream.v1.DraftService",
        lambda server, interceptor: add_DraftServiceServicer_to_server(DraftServicer(drafter, interceptor), server),
        drafter.scheduler.refusals,
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
    interceptor = AuthInterceptor(credentials, refusals, trust.max_streams_per_host)
    server = grpc.aio.server(interceptors=[interceptor], options=SERVER_OPTIONS)
    add(server, interceptor)
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    if trust.reflection:
        reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = credentials.listen(server, host, port, interceptor.handshakes.on_handshake)
    await server.start()
    await checker.set(service, health_pb2.HealthCheckResponse.SERVING)
    return GrpcServer(server, f"{host}:{bound}", interceptor)
