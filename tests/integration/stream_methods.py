"""All gRPC entry points of the system, and how a stranger opens a stream at each."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from cluster.trust import PeerRole
from protos import speculation_pb2 as pb
from protos.speculation_pb2_grpc import DraftServiceStub, TargetServiceStub
from tests.integration.harness import Cluster


@dataclass(frozen=True)
class StreamMethod:
    """gRPC method that accepts streams."""

    path: str
    stub: Callable[[grpc.aio.Channel], Any]
    frame: Any
    caller: PeerRole
    server: PeerRole
    opened_by: Any = field(repr=False)  # returns the peer's address in a cluster

    def address(self, c: Cluster) -> str:
        (address,) = self.opened_by(c)
        return str(address)


DRIVE_TARGET = StreamMethod(
    "/slipstream.v1.TargetService/Drive",
    lambda ch: TargetServiceStub(ch).Drive(),
    pb.RouterToTarget,
    PeerRole.ROUTER,
    PeerRole.TARGET,
    lambda c: c.targets,
)
VERIFY = StreamMethod(
    "/slipstream.v1.TargetService/Verify",
    lambda ch: TargetServiceStub(ch).Verify(),
    pb.DrafterToTarget,
    PeerRole.DRAFTER,
    PeerRole.TARGET,
    lambda c: c.targets,
)
STATES = StreamMethod(
    "/slipstream.v1.TargetService/States",
    lambda ch: TargetServiceStub(ch).States(),
    pb.DrafterToTargetStates,
    PeerRole.DRAFTER,
    PeerRole.TARGET,
    lambda c: c.targets,
)
DRIVE_DRAFTER = StreamMethod(
    "/slipstream.v1.DraftService/Drive",
    lambda ch: DraftServiceStub(ch).Drive(),
    pb.RouterToDrafter,
    PeerRole.ROUTER,
    PeerRole.DRAFTER,
    lambda c: c.drafters,
)
STREAM_METHODS = pytest.mark.parametrize(
    "method", [DRIVE_TARGET, VERIFY, STATES, DRIVE_DRAFTER], ids=lambda d: d.path.rpartition(".")[2]
)


@asynccontextmanager
async def stream_to(c: Cluster, method: StreamMethod) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(method.address(c)) as channel:
        yield method.stub(channel)


@contextmanager
def refused_with(code: grpc.StatusCode, details: str) -> Iterator[None]:
    with pytest.raises(grpc.aio.AioRpcError, match=details) as error:
        yield
    assert error.value.code() is code


@contextmanager
def reveals_only(code: grpc.StatusCode) -> Iterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        yield
    status = (error.value.code(), error.value.details())
    assert status == (code, ""), status


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await work
