"""Links share a connection, which stays open while one uses it; a fake replaces gRPC's stream."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pytest

from actors.net.streams import Link
from cluster.errors import ProtocolError
from cluster.trust import PeerRole
from protos import speculation_pb2 as pb
from protos.codec import encode
from protos.messages import Hello, Welcome


class Stream:
    """Welcomes whoever greets it, and then says nothing, or breaks."""

    def __init__(self, breaks: bool) -> None:
        self._breaks = breaks
        self._is_greeted = False

    async def write(self, frame: Any) -> None:
        pass

    async def read(self) -> Any:
        if not self._is_greeted:
            self._is_greeted = True
            return encode(pb.TargetToDrafter, [Welcome("target")])
        if self._breaks:
            raise ProtocolError("broken")
        return await asyncio.get_running_loop().create_future()


class Peer:
    """Credentials, channel and stub of one peer; knows its streams only for as long as somebody else does."""

    metadata = ()

    def __init__(self, breaks: bool = False) -> None:
        self.streams: list[weakref.ref[Stream]] = []
        self._breaks = breaks

    def dial(self, address: str, peer: PeerRole) -> "Peer":
        return self

    async def __aenter__(self) -> "Peer":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        pass

    def call(self, channel: Any, metadata: Any) -> Stream:
        stream = Stream(self._breaks)
        self.streams.append(weakref.ref(stream))
        return stream


@pytest.fixture
def nothing_is_collected() -> Iterator[None]:
    """A process that rests collects nothing for hours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def linked(peer: Any, up: asyncio.Event, down: asyncio.Event) -> Link:
    def hello() -> Hello:
        return Hello("drafter", "v", "m")

    return Link(
        "there", PeerRole.TARGET, peer, peer.call, pb.DrafterToTarget, hello, up.set, lambda frame: None, down.set
    )


@pytest.mark.usefixtures("nothing_is_collected")
async def test_nobody_knows_of_the_stream_of_a_closed_link() -> None:
    peer = Peer()
    up = asyncio.Event()
    link = linked(peer, up, asyncio.Event())
    await up.wait()
    assert [stream() is not None for stream in peer.streams] == [True]
    await link.close()
    await asyncio.sleep(0)  # until the event loop has forgotten its task
    assert [stream() for stream in peer.streams] == [None]
    await link.close()


@pytest.mark.usefixtures("nothing_is_collected")
async def test_nobody_knows_of_a_stream_that_broke() -> None:
    peer = Peer(breaks=True)
    down = asyncio.Event()
    link = linked(peer, asyncio.Event(), down)
    await down.wait()
    await asyncio.sleep(0)  # until it waits to dial again
    assert [stream() for stream in peer.streams] == [None]
    await link.close()
