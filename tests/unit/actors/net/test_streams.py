"""Tests queued messages of a peer, and links that share a connection, with a fake gRPC stream."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import pytest

from actors.net.streams import InvalidFrame, Link, Outbox, StatesOutbox, decode_after_greeting
from cluster.errors import ProtocolError
from cluster.trust import PeerRole
from cluster.verification.hidden_state_sender import UNSTORED_WINDOW_BYTES
from protos import speculation_pb2 as pb
from protos.codec import decode, encode
from protos.messages import (
    MAX_STATES_BYTES,
    PROTOCOL_VERSION,
    Attach,
    Close,
    Detach,
    Hello,
    Message,
    StateDtype,
    States,
    Verdict,
    Welcome,
)
from tests.unit.cluster.samples import an_open

HALF = States("s", 0, 0, StateDtype.BFLOAT16, 8, bytes(MAX_STATES_BYTES // 2))


async def frames(outbox: Outbox, count: int) -> list[list[Message]]:
    return [await outbox.take() for _ in range(count)]


async def test_frames_of_states_are_small_enough_for_other_streams():
    """Two halves with their overhead exceed a frame."""
    outbox = StatesOutbox()
    for _ in range(3):
        outbox.put(HALF)
    assert [len(frame) for frame in await frames(outbox, 3)] == [1, 1, 1]
    small = States("s", 0, 0, StateDtype.BFLOAT16, 8, bytes(16))
    for _ in range(3):
        outbox.put(small)
    assert [len(frame) for frame in await frames(outbox, 1)] == [3]


async def test_the_queue_of_states_holds_all_that_a_target_sends_without_an_acknowledgement():
    """On a slow network, nearly all of it is still queued."""
    outbox = StatesOutbox()
    ends = asyncio.ensure_future(outbox.overflow())
    for _ in range(UNSTORED_WINDOW_BYTES // len(HALF.rows)):
        outbox.put(HALF)
    await asyncio.sleep(0)
    assert not ends.done()
    ends.cancel()


async def test_a_drafter_that_takes_no_states_loses_its_stream_and_not_the_targets_memory():
    """Taken messages free their space; the queue drops messages after the end of the stream."""
    outbox = StatesOutbox()
    ends = asyncio.ensure_future(outbox.overflow())
    for _ in range(3):
        outbox.put(HALF)
    await frames(outbox, 3)
    given = 0
    while not ends.done():
        outbox.put(HALF)
        given += 1
        assert given < 1000
        await asyncio.sleep(0)
    with pytest.raises(ProtocolError):
        await ends
    for _ in range(100):
        outbox.put(HALF)
    taken = 0
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0):
                taken += len(await outbox.take())
    assert 3 < taken < given


@pytest.mark.parametrize(
    ("frame_type", "earlier", "later"),
    [
        (pb.RouterToDrafter, Close("s", 1), an_open("s", attempt=2)),
        (pb.DrafterToTarget, Attach("s", 3, 0), Detach("s")),
    ],
    ids=["close", "attach"],
)
async def test_messages_about_a_session_are_read_in_the_order_they_were_sent(frame_type, earlier, later):
    """Within a frame, messages are read by kind."""
    outbox = Outbox()
    others = [replace(message, session="other") for message in (later, earlier)]
    for message in (earlier, *others, later):
        outbox.put(message)
    read: list[list[Message]] = []
    while sum(map(len, read)) < 4:
        read.append(list(decode(encode(frame_type, await outbox.take())).messages))
    assert [message for messages in read for message in messages if message.session == "s"] == [earlier, later]
    assert len(read[0]) == 3, "messages about other sessions share the frame"


async def test_other_outboxes_are_bounded_by_messages_as_before():
    outbox = Outbox(limit=2)
    for _ in range(3):
        outbox.put(Verdict("s", 1, 1, 0, (1,), 0, 0))
    with pytest.raises(ProtocolError, match="2 messages behind"):
        await asyncio.wait_for(outbox.overflow(), 10)


@pytest.mark.parametrize(
    ("frame_type", "messages"),
    [
        (pb.RouterToTarget, [Close(str(number), 1) for number in range(5000)]),
        (pb.TargetToRouter, [Verdict(str(number), 1, 1, 0, (1,), 0, 0) for number in range(5000)]),
    ],
    ids=["messages", "rows"],
)
async def test_a_frame_holds_no_more_messages_than_a_peer_reads_at_once(frame_type, messages):
    outbox = Outbox()
    with pytest.raises(InvalidFrame):
        decode_after_greeting(encode(frame_type, messages))
    for message in messages:
        outbox.put(message)
    found: list[Message] = []
    while len(found) < len(messages):
        frame = await outbox.take()
        assert list(decode_after_greeting(encode(frame_type, frame)).messages) == frame
        found += frame
    assert found == messages


# ---------------------------------------------------------------- links


class Stream:
    """Stream that welcomes its caller, and then stays silent or breaks."""

    def __init__(self, breaks: bool, welcome: Welcome) -> None:
        self.breaks = breaks
        self.welcome = welcome
        self.is_greeted = False

    async def write(self, frame: Any) -> None:
        pass

    async def read(self) -> Any:
        if not self.is_greeted:
            self.is_greeted = True
            return encode(pb.TargetToDrafter, [self.welcome])
        if self.breaks:
            raise ProtocolError("broken")
        return await asyncio.get_running_loop().create_future()


class Peer:
    """Credentials, channel and stub of a peer, with weak references to its streams."""

    metadata = ()

    def __init__(self, breaks: bool = False, version: int = PROTOCOL_VERSION) -> None:
        self.streams: list[weakref.ref[Stream]] = []
        self.breaks = breaks
        self.welcome = Welcome("target", version)

    def dial(self, address: str, peer: PeerRole) -> "Peer":
        return self

    async def __aenter__(self) -> "Peer":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        pass

    def call(self, channel: Any, metadata: Any) -> Stream:
        stream = Stream(self.breaks, self.welcome)
        self.streams.append(weakref.ref(stream))
        return stream


@pytest.fixture
def nothing_is_collected() -> Iterator[None]:
    """Disables garbage collection, as in an idle process."""
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
async def test_the_stream_of_a_closed_link_is_forgotten() -> None:
    peer = Peer()
    up = asyncio.Event()
    link = linked(peer, up, asyncio.Event())
    await up.wait()
    assert [stream() is not None for stream in peer.streams] == [True]
    await link.close()
    await asyncio.sleep(0)  # until the event loop has released the task
    assert [stream() for stream in peer.streams] == [None]
    await link.close()


@pytest.mark.usefixtures("nothing_is_collected")
async def test_a_broken_stream_is_forgotten() -> None:
    peer = Peer(breaks=True)
    down = asyncio.Event()
    link = linked(peer, asyncio.Event(), down)
    await down.wait()
    await asyncio.sleep(0)  # until the link waits to redial
    assert [stream() for stream in peer.streams] == [None]
    await link.close()


async def test_a_peer_with_another_protocol_version_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """The log names both versions once, however often the link redials."""
    peer = Peer(version=PROTOCOL_VERSION - 1)
    up = asyncio.Event()
    link = linked(peer, up, asyncio.Event())
    while len(peer.streams) < 2:
        await asyncio.sleep(0)
    why = f"the peer has {PROTOCOL_VERSION - 1}, this side has {PROTOCOL_VERSION}; run the same release"
    assert link.refused is not None
    assert why in link.refused
    assert not up.is_set()
    assert len([record for record in caplog.records if why in record.getMessage()]) == 1
    await link.close()
