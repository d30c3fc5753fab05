"""Long-lived bidirectional streams of frames: one writer and one bounded queue per peer.

Whatever is due for a peer when its writer comes round goes out as one frame. Nobody ever waits for another peer's
write: a queue that overflows means that the peer is down.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from actors.transport.conversation_parts import until_one_ends
from actors.transport.credentials import Credentials, Metadata
from cluster.errors import ProtocolError
from cluster.trust.roles import PeerRole
from protos.codec import Decoded, decode, encode, encoded_bytes
from protos.messages import PROTOCOL_VERSION, Hello, Message, Welcome
from protos.states import MAX_STATES_BYTES

log = logging.getLogger(__name__)

OUTBOX_LIMIT = 8192  # messages; a peer that is this far behind is not coming back in time
STATES_OUTBOX_BYTES = 32 << 20  # several windows: a drafter that attaches again is sent what is on its way once more
FRAME_BYTES = 4 << 20  # about what one frame may hold; a single message may be larger
HELLO_S = 10.0  # for a caller to greet
RECONNECT_S = (0.05, 0.2, 0.5, 1.0)  # waits between attempts to dial; the last one repeats

MOST_MESSAGES = 1024  # of one frame: reading it holds up all others, for some 20 ms
REST = 40.0  # times as long as a peer's messages took that nobody had asked for, it is not listened to

REFUSING = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
"""What a peer answers that will not talk to us until something is changed."""


class Outbox:
    """What is due for one peer."""

    def __init__(self, limit: int = OUTBOX_LIMIT, frame_bytes: int = FRAME_BYTES) -> None:
        self._limit = limit
        self._frame_bytes = frame_bytes
        self._due: deque[Message] = deque()
        self._changed = asyncio.Event()
        self._overflow = asyncio.Event()

    def put(self, message: Message) -> None:
        """Never waits. An overflow ends the stream; its owner hears of it as of any other break."""
        if len(self._due) >= self._limit:
            self._overflow.set()
        else:
            self._due.append(message)
            self._changed.set()

    async def take(self) -> list[Message]:
        """Everything due, at least one message, at most a frame's worth."""
        while not self._due:
            self._changed.clear()
            await self._changed.wait()
        frame = [self._due.popleft()]
        size = encoded_bytes(frame[0])
        while self._due and len(frame) < MOST_MESSAGES:
            if (size := size + encoded_bytes(self._due[0])) > self._frame_bytes:
                break
            frame.append(self._due.popleft())
        return frame

    async def overflow(self) -> None:
        """Raises ProtocolError as soon as the queue overflows, also while a write hangs."""
        await self._overflow.wait()
        raise ProtocolError(f"the peer is {self._limit} messages behind")


class StatesOutbox(Outbox):
    """Hidden states that are due for one peer: frames are small, so that other streams get their turn between them."""

    def __init__(self) -> None:
        super().__init__(frame_bytes=MAX_STATES_BYTES)
        self._bytes = 0

    def put(self, message: Message) -> None:
        """As any outbox's, but that bytes overflow too; for a peer that keeps to the protocol windows bound them."""
        self._bytes += encoded_bytes(message)
        if self._bytes > STATES_OUTBOX_BYTES:
            self._overflow.set()
        else:
            super().put(message)

    async def take(self) -> list[Message]:
        frame = await super().take()
        self._bytes -= sum(map(encoded_bytes, frame))
        return frame


class UnfitFrame(ProtocolError):
    """A frame that no honest peer sends; it ends the stream."""


def decode_greeted(frame: ProtoMessage) -> Decoded:
    """A frame after the greeting, which may not come again. It is the first field of a frame, so one look is enough."""
    repeated = [value for descriptor, value in frame.ListFields() if descriptor.is_repeated]
    if (count := sum(map(len, repeated))) > MOST_MESSAGES:
        raise UnfitFrame(f"{count} messages in one frame")
    found = decode(frame)
    if isinstance(next(iter(found.messages), None), Hello | Welcome):
        raise UnfitFrame("greeted twice on one stream")
    return found


# ---------------------------------------------------------------- the side that is dialled


def check_hello(hello: Message | None, vocabulary: str, target_model: str) -> Hello:
    """The greeting, or ProtocolError with what differs."""
    if not isinstance(hello, Hello):
        raise ProtocolError("the first frame on a stream must hold a Hello")
    pairs = (
        ("protocol version", hello.protocol_version, PROTOCOL_VERSION),
        ("vocabulary", hello.vocabulary, vocabulary),
        ("target model", hello.target_model, target_model),
    )
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise ProtocolError(f"{name} differs: the caller has {theirs}, this side has {ours}")
    return hello


async def read_hello(context: grpc.aio.ServicerContext[Any, Any], vocabulary: str, target_model: str) -> Hello:
    """Reads and checks the greeting; a caller that does not fit is sent away with the reason."""
    try:
        async with asyncio.timeout(HELLO_S):
            frame = await _read_frame(context)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED)
    decoded = decode(frame) if frame is not grpc.aio.EOF else Decoded(())
    try:
        return check_hello(next(iter(decoded.messages), None), vocabulary, target_model)
    except ProtocolError as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise


async def _read_frame(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The next frame or EOF; a caller whose bytes are no frame is sent away."""
    try:
        return await context.read()
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a frame of this protocol: {error}")
        raise


async def converse(
    context: grpc.aio.ServicerContext[Any, Any],
    reply_type: type[ProtoMessage],
    outbox: Outbox,
    on_frame: Callable[[Decoded], int | None],
) -> None:
    """Serves a greeted stream until either side ends it.

    `on_frame` returns how many of the messages nobody had asked for. A peer that sends many is heard seldom, and TCP
    holds it back: whatever it does, others have the event loop.
    """

    async def read() -> None:
        while (frame := await _read_frame(context)) is not grpc.aio.EOF:
            began = time.perf_counter()
            try:
                decoded = decode_greeted(frame)
                if unasked := on_frame(decoded):
                    await asyncio.sleep(REST * (time.perf_counter() - began) * unasked / len(decoded.messages))
            except UnfitFrame:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT)

    async def write() -> None:
        while True:
            await context.write(encode(reply_type, await outbox.take()))

    await until_one_ends(read(), write(), outbox.overflow())


# ---------------------------------------------------------------- the side that dials


class Link:
    """A stream to one peer that is dialled again whenever it breaks, until it is closed.

    `peer` is the role that the peer has to prove. `call` opens the stream on a channel. `on_up` is called after the
    peer's Welcome, `on_down` once for each time that it was up. `hello` is asked anew for every dial, so that it lists
    what is alive then.
    """

    def __init__(
        self,
        address: str,
        peer: PeerRole,
        credentials: Credentials,
        call: Callable[[grpc.aio.Channel, Metadata], Any],
        frame_type: type[ProtoMessage],
        hello: Callable[[], Hello],
        on_up: Callable[[], None],
        on_frame: Callable[[Decoded], None],
        on_down: Callable[[], None],
    ) -> None:
        self.address = address
        self.refused: str | None = None  # why the peer will not talk to us
        self.is_up = False
        self._peer = peer
        self._credentials = credentials
        self._call = call
        self._frame_type = frame_type
        self._hello = hello
        self._on_up = on_up
        self._on_frame = on_frame
        self._on_down = on_down
        self._outbox = Outbox()
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._keep_open())

    def send(self, message: Message) -> None:
        """Sends if the link is up; a message for a peer that is down is void."""
        if self.is_up:
            self._outbox.put(message)

    async def close(self) -> None:
        """Ends the stream, and its connection with it."""
        if (task := self._task) is not None:
            self._task = None  # a cancelled task knows where it was, and so this link: the connection would stay
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _keep_open(self) -> None:
        failures = 0
        while True:
            try:
                await self._converse()
                failures = 0
            except (grpc.aio.AioRpcError, ProtocolError, asyncio.InvalidStateError) as error:
                failures = 0 if self.is_up else failures + 1
                self._note(error)
            except Exception:  # all that a peer's messages bring about here: none may end the link for ever
                failures += 1
                log.exception("stream to %s broke on a message that could not be handled", self.address)
            finally:
                if self.is_up:
                    self.is_up = False
                    self._on_down()
            await asyncio.sleep(RECONNECT_S[min(failures, len(RECONNECT_S) - 1)])

    def _note(self, error: Exception) -> None:
        """A refusal is an error once, however often it is heard."""
        if not isinstance(error, grpc.aio.AioRpcError):
            log.info("stream to %s broke: %s", self.address, error)
        elif error.code() in REFUSING:
            why = error.details() or error.code().name
            if why != self.refused:
                log.error("%s refuses to talk: %s", self.address, why)
            self.refused = why
        else:
            log.info("stream to %s broke: %s: %s", self.address, error.code(), error.details())

    async def _converse(self) -> None:
        """Credentials are read for each dial: those that were replaced meanwhile are in use from then on."""
        async with self._credentials.dial(self.address, self._peer) as channel:
            stream = self._call(channel, self._credentials.metadata)
            await stream.write(encode(self._frame_type, [self._hello()]))
            frame = await stream.read()
            if frame is grpc.aio.EOF:
                raise ProtocolError(f"{self.address} ended the stream without a Welcome")
            first = decode(frame).messages
            if not first or not isinstance(first[0], Welcome):
                raise ProtocolError(f"{self.address} did not answer the Hello with a Welcome")
            self.refused = None
            self._outbox = Outbox()
            self.is_up = True
            self._on_up()
            await until_one_ends(self._read(stream), self._write(stream), self._outbox.overflow())

    async def _read(self, stream: Any) -> None:
        while (frame := await stream.read()) is not grpc.aio.EOF:
            self._on_frame(decode_greeted(frame))

    async def _write(self, stream: Any) -> None:
        while True:
            await stream.write(encode(self._frame_type, await self._outbox.take()))
