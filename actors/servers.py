"""The gRPC servers of drafter and target: streams in, calls on the replica out."""

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from actors.drafter import Drafter
from actors.target import TargetReplica
from actors.transport.streams import CHANNEL_OPTIONS, converse, read_hello
from protos import speculation_pb2 as pb
from protos.speculation_pb2_grpc import (
    DraftServiceServicer,
    TargetServiceServicer,
    add_DraftServiceServicer_to_server,
    add_TargetServiceServicer_to_server,
)

Context = grpc.aio.ServicerContext[Any, Any]


class TargetServicer(TargetServiceServicer):
    """Streams of a target replica."""

    def __init__(self, replica: TargetReplica) -> None:
        self._replica = replica

    async def Drive(self, _: Any, context: Context) -> None:
        replica = self._replica
        hello = await read_hello(context, replica.vocabulary, replica.target_model)
        stream, outbox = replica.stream_up(hello)
        try:
            await converse(context, pb.TargetToRouter, outbox, lambda frame: replica.receive(stream, frame))
        finally:
            replica.stream_down(stream)

    async def Verify(self, _: Any, context: Context) -> None:
        replica = self._replica
        hello = await read_hello(context, replica.vocabulary, replica.target_model)
        stream, outbox = replica.stream_up(hello)
        try:
            await converse(context, pb.TargetToDrafter, outbox, lambda frame: replica.receive(stream, frame))
        finally:
            replica.stream_down(stream)

    async def States(self, _: Any, context: Context) -> None:
        replica = self._replica
        hello = await read_hello(context, replica.vocabulary, replica.target_model)
        stream, outbox = replica.states_up(hello)
        try:
            await converse(context, pb.TargetToDrafterStates, outbox, lambda frame: replica.receive(stream, frame))
        finally:
            replica.states_down(stream, outbox)


class DraftServicer(DraftServiceServicer):
    """Streams of a drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    async def Drive(self, _: Any, context: Context) -> None:
        drafter = self._drafter
        hello = await read_hello(context, drafter.vocabulary, drafter.target_model)
        stream, outbox = drafter.router_up(hello)
        try:
            await converse(context, pb.DrafterToRouter, outbox, lambda frame: drafter.receive(stream, frame))
        finally:
            drafter.router_down(stream)


class GrpcServer:
    """A started server; `address` is what peers dial."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address

    async def stop(self, grace_s: float = 0.5) -> None:
        await self._server.stop(grace_s)


async def serve_target(replica: TargetReplica, host: str, port: int = 0) -> GrpcServer:
    """Starts a target's server; port 0 takes a free one."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_TargetServiceServicer_to_server(TargetServicer(replica), server)
    return await _start(server, "slipstream.v1.TargetService", host, port)


async def serve_drafter(drafter: Drafter, host: str, port: int = 0) -> GrpcServer:
    """Starts a drafter's server; port 0 takes a free one."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_DraftServiceServicer_to_server(DraftServicer(drafter), server)
    return await _start(server, "slipstream.v1.DraftService", host, port)


async def _start(server: grpc.aio.Server, service: str, host: str, port: int) -> GrpcServer:
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    await checker.set(service, health_pb2.HealthCheckResponse.SERVING)
    return GrpcServer(server, f"{host}:{bound}")
