"""Unix socket between a coordinator and its leading rank: one request at a time, and its answer.

A request is sent before `StepCaller.call` returns, so that the caller can work while the rank computes. Only processes
of the same user can reach the socket, and it is unlinked once the coordinator has connected.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

FRAME_HEADER = struct.Struct("!I")  # length of the following message, in bytes


class StepListener:
    """The rank's end of the socket; serves one caller."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="slipstream-")
        self.path = str(Path(self._folder.name) / "steps")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(1)

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        """Answers messages until the caller disconnects. Closes the connection and raises if `answer` raises."""
        caller, _ = self._socket.accept()
        self._socket.close()
        self._folder.cleanup()
        with caller, caller.makefile("rb") as messages:
            while header := messages.read(FRAME_HEADER.size):
                (size,) = FRAME_HEADER.unpack(header)
                body = answer(messages.read(size))
                caller.sendall(FRAME_HEADER.pack(len(body)) + body)


class StepCaller(asyncio.Protocol):
    """The coordinator's end of the socket; makes one call at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    @classmethod
    async def dial(cls, path: str) -> "StepCaller":
        _, caller = await asyncio.get_running_loop().create_unix_connection(cls, path)
        return caller

    def call(self, message: bytes) -> asyncio.Future[bytes]:
        """Sends a request and returns a future of its answer, which raises ConnectionError if the rank has failed."""
        assert self._answer is None or self._answer.done(), "the previous call must be answered first"
        assert self._transport is not None, "dial first"
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._answer.set_exception(ConnectionResetError("the rank has closed the connection"))
        else:
            self._transport.write(FRAME_HEADER.pack(len(message)) + message)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if len(received) < FRAME_HEADER.size:
            return
        end = FRAME_HEADER.size + FRAME_HEADER.unpack_from(received)[0]
        if len(received) >= end:
            body = bytes(received[FRAME_HEADER.size : end])
            del received[:end]
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the rank has closed the connection"))
