"""Long-lived bidirectional streams of frames, with one writer and one bounded queue per peer.

A writer sends all messages queued for its peer as one frame, up to a size limit. No peer waits for another peer's
write: if a queue overflows, its peer counts as disconnected.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from actors.net.credentials import Credentials, Metadata
from cluster.errors import ProtocolError
from cluster.trust import PeerRole
from cluster.verification.hidden_state_sender import UNSTORED_WINDOW_BYTES
from protos.codec import Decoded, decode, encode, encoded_bytes, message_count, overtakes
from protos.messages import MAX_STATES_BYTES, PROTOCOL_VERSION, Hello, Identity, Message, Welcome


async def wait_until_any_ends(*coroutines: Any) -> None:
    """Runs coroutines until one ends, cancels the others, and raises the exception of the first, if any."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        failures = list(filter(None, [task.exception() for task in done]))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # The exception's traceback references this frame; unless cleared, the reference cycle keeps the stream alive.
    tasks.clear()
    done.clear()
    if failures:
        raise failures.pop()


log = logging.getLogger(__name__)

OUTBOX_LIMIT = 8192  # messages; a peer this far behind will not catch up in time
STATES_OUTBOX_BYTES = 2 * UNSTORED_WINDOW_BYTES  # after reattaching, a drafter receives in-flight messages again
FRAME_BYTES = 4 << 20  # approximate frame size; a single message may be larger
HELLO_S = 10.0  # timeout for a caller's Hello
RECONNECT_S = (0.05, 0.2, 0.5, 1.0)  # pauses between dial attempts; the last one repeats

MAX_FRAME_MESSAGES = 1024  # decoding this number of blocks takes 1 ms; with draft probabilities, 30 to 90 ms
REST_FACTOR = 40.0  # pause after unrequested messages, as a multiple of their handling time

REFUSING = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
"""Status codes of a refusal that persists until the configuration of either side changes."""


class Outbox:
    """Outgoing message queue of one peer."""

    def __init__(self, limit: int = OUTBOX_LIMIT, frame_bytes: int = FRAME_BYTES) -> None:
        self._limit = limit
        self._frame_bytes = frame_bytes
        self._due: deque[Message] = deque()
        self._changed = asyncio.Event()
        self._overflow = asyncio.Event()

    def put(self, message: Message) -> None:
        """Enqueues a message without waiting. An overflow ends the stream."""
        if len(self._due) >= self._limit:
            self._overflow.set()
        else:
            self._due.append(message)
            self._changed.set()

    async def take(self) -> list[Message]:
        """Waits for messages; returns one or more, at most one frame, in which no message overtakes another."""
        while not self._due:
            self._changed.clear()
            await self._changed.wait()
        frame = [self._due.popleft()]
        size = encoded_bytes(frame[0])
        while self._due and len(frame) < MAX_FRAME_MESSAGES:
            size += encoded_bytes(self._due[0])
            if size > self._frame_bytes or overtakes(self._due[0], frame):
                break
            frame.append(self._due.popleft())
        return frame

    async def overflow(self) -> None:
        """Raises ProtocolError as soon as the queue overflows, even while a write hangs."""
        await self._overflow.wait()
        raise ProtocolError(f"the peer is {self._limit} messages behind; it must reconnect")


class StatesOutbox(Outbox):
    """Outgoing queue of hidden states for one peer. Frames are small, so that other streams can send between them."""

    def __init__(self) -> None:
        super().__init__(frame_bytes=MAX_STATES_BYTES)
        self._bytes = 0

    def put(self, message: Message) -> None:
        """Enqueues a message; also limits the queue size in bytes.

        The flow-control windows keep the queue of a well-behaved peer below this limit.
        """
        self._bytes += encoded_bytes(message)
        if self._bytes > STATES_OUTBOX_BYTES:
            self._overflow.set()
        else:
            super().put(message)

    async def take(self) -> list[Message]:
        frame = await super().take()
        self._bytes -= sum(map(encoded_bytes, frame))
        return frame


class InvalidFrame(ProtocolError):
    """Frame that no correct peer sends; it ends the stream."""


def decode_after_greeting(frame: ProtoMessage) -> Decoded:
    """Decodes a frame received after the greeting. Raises InvalidFrame for a second greeting or too many messages.

    A greeting is the first field of a frame, so checking the first message is enough.
    """
    if (count := message_count(frame)) > MAX_FRAME_MESSAGES:
        raise InvalidFrame(f"{count} messages in one frame; send at most {MAX_FRAME_MESSAGES}")
    decoded = decode(frame)
    if isinstance(next(iter(decoded.messages), None), Hello | Welcome):
        raise InvalidFrame("second greeting on one stream; send Hello or Welcome once")
    return decoded


class OtherVersion(ProtocolError):
    """The peer uses a different protocol version."""


def check_version(greeting: Hello | Welcome) -> None:
    """Raises OtherVersion if the sender's protocol version differs."""
    if (theirs := greeting.protocol_version) != PROTOCOL_VERSION:
        raise OtherVersion(
            f"protocol version differs: the peer has {theirs}, this side has {PROTOCOL_VERSION}; "
            "run the same release of Slipstream on both"
        )


# ---------------------------------------------------------------- dialed side


def check_hello(hello: Message | None, identities: Sequence[Identity]) -> Hello:
    """Returns the greeting. Raises ProtocolError, naming the mismatch, if it matches none of this side's models."""
    if not isinstance(hello, Hello):
        raise ProtocolError("the first frame on a stream must hold a Hello")
    check_version(hello)
    same_vocabulary = [one for one in identities if one.vocabulary == hello.vocabulary]
    for name, theirs, ours in (
        ("vocabulary", hello.vocabulary, [one.vocabulary for one in identities]),
        ("target model", hello.target_model, [one.target_model for one in same_vocabulary]),
    ):
        if theirs not in ours:
            raise ProtocolError(f"{name} differs: the caller has {theirs}, this side has {' and '.join(ours)}")
    return hello


async def read_hello(context: grpc.aio.ServicerContext[Any, Any], identities: Sequence[Identity]) -> Hello:
    """Reads and checks the greeting; aborts the call with the reason if it matches none of this side's models."""
    try:
        async with asyncio.timeout(HELLO_S):
            frame = await _read_frame(context)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED)
    decoded = decode(frame) if frame is not grpc.aio.EOF else Decoded(())
    try:
        return check_hello(next(iter(decoded.messages), None), identities)
    except ProtocolError as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise


async def _read_frame(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """Returns the next frame or EOF; aborts the call on an invalid frame."""
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
    """Serves a stream after its greeting until either side ends it.

    `on_frame` returns the number of unrequested messages. The more of them a peer sends, the longer the pauses between
    reads. TCP then throttles the peer, so it cannot monopolize the event loop.
    """

    async def read() -> None:
        while (frame := await _read_frame(context)) is not grpc.aio.EOF:
            began = time.perf_counter()
            try:
                decoded = decode_after_greeting(frame)
                if unrequested := on_frame(decoded):
                    await asyncio.sleep(
                        REST_FACTOR * (time.perf_counter() - began) * unrequested / len(decoded.messages)
                    )
            except InvalidFrame:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT)

    async def write() -> None:
        while True:
            await context.write(encode(reply_type, await outbox.take()))

    await wait_until_any_ends(read(), write(), outbox.overflow())


# ---------------------------------------------------------------- dialing side


class Link:
    """Stream to one peer, redialed after each break until closed.

    The peer must prove the role `peer`. `call` opens the stream on a channel. `on_up` is called after the peer's
    Welcome, and `on_down` when an established stream breaks. `hello` is called for every dial, so that the Hello lists
    the sessions alive at that time.
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
        self.refused: str | None = None  # the peer's reason for refusing the connection
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
        """Sends the message if the link is up; otherwise drops it."""
        if self.is_up:
            self._outbox.put(message)

    async def close(self) -> None:
        """Ends the stream and its connection."""
        if (task := self._task) is not None:
            self._task = None  # a cancelled task's traceback references this link and would keep the connection open
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
            except Exception:  # handling a peer's messages must not end the link for good
                failures += 1
                log.exception("stream to %s broke on a message that could not be handled", self.address)
            finally:
                if self.is_up:
                    self.is_up = False
                    self._on_down()
            await asyncio.sleep(RECONNECT_S[min(failures, len(RECONNECT_S) - 1)])

    def _note(self, error: Exception) -> None:
        """Logs a lost connection, and repeated refusals as an error only the first time."""
        why = str(error)
        is_refusal = isinstance(error, OtherVersion)
        if isinstance(error, grpc.aio.AioRpcError):
            is_refusal = error.code() in REFUSING
            why = (error.details() or error.code().name) if is_refusal else f"{error.code()}: {error.details()}"
        if not is_refusal:
            log.info("stream to %s broke: %s", self.address, why)
            return
        if why != self.refused:
            log.error("%s refuses the connection: %s", self.address, why)
        self.refused = why

    async def _converse(self) -> None:
        """Dials and runs the stream. Reloads credentials for each dial, so that replacements take effect."""
        async with self._credentials.dial(self.address, self._peer) as channel:
            stream = self._call(channel, self._credentials.metadata)
            await stream.write(encode(self._frame_type, [self._hello()]))
            frame = await stream.read()
            if frame is grpc.aio.EOF:
                raise ProtocolError(f"{self.address} ended the stream without a Welcome")
            first = decode(frame).messages
            if not first or not isinstance(first[0], Welcome):
                raise ProtocolError(f"{self.address} did not answer the Hello with a Welcome")
            check_version(first[0])
            self.refused = None
            self._outbox = Outbox()
            self.is_up = True
            self._on_up()
            await wait_until_any_ends(self._read(stream), self._write(stream), self._outbox.overflow())

    async def _read(self, stream: Any) -> None:
        while (frame := await stream.read()) is not grpc.aio.EOF:
            self._on_frame(decode_after_greeting(frame))

    async def _write(self, stream: Any) -> None:
        while True:
            await stream.write(encode(self._frame_type, await self._outbox.take()))
