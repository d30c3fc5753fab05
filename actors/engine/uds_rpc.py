"""A step's way from the coordinator to the leading rank and back: one message each over a Unix socket.

A Ray call costs milliseconds where cores are few, and every step would pay them. Ray still starts the ranks and tells
of their death. Only processes of the same user can reach the socket, which is gone once the coordinator has dialled.
"""

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HEADER = struct.Struct("!I")  # bytes that follow


class StepListener:
    """The rank's end: answers one caller."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="slipstream-")
        self.path = str(Path(self._folder.name) / "steps")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(1)

    def serve(self, answer: Callable[[Any], Any]) -> None:
        """Answers messages until the caller hangs up. What `answer` raises ends the conversation and is raised here."""
        caller, _ = self._socket.accept()
        self._socket.close()
        self._folder.cleanup()
        with caller, caller.makefile("rb") as messages:
            while header := messages.read(HEADER.size):
                (size,) = HEADER.unpack(header)
                caller.sendall(_framed(answer(pickle.loads(messages.read(size)))))


class StepCaller:
    """The coordinator's end: one call at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def dial(cls, path: str) -> "StepCaller":
        return cls(*await asyncio.open_unix_connection(path))

    async def call(self, message: Any) -> Any:
        """Raises ConnectionError or EOFError when the rank is gone or has failed."""
        self._writer.write(_framed(message))
        (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return pickle.loads(await self._reader.readexactly(size))

    def close(self) -> None:
        self._writer.close()


def _framed(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body
