"""Links of a replica's processes on one node: coordinator to leading rank, and leading rank to its followers.

Messages are in shared memory, and a Unix socket carries their notices. A waiting process is blocked on its socket, so
it uses no CPU and wakes when a message arrives or its peer ends. Polling first would save 20 us, but only if the next
message comes within the polling time (`benchmarks/rank_link.py`). Only processes of the same user can reach a socket,
and it is unlinked once its peers have connected.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from actors.engine.shared_memory import NOTICE, MessageMemory, new_memory

# A follower's acknowledgement of the previous message; also the byte sent along with memory descriptors.
READY = b"\x01"


class Listener:
    """Unix socket that waits for its peers."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="slipstream-")
        self.path = str(Path(self._folder.name) / "steps")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen()

    def accept(self, peers: int) -> list[socket.socket]:
        """Returns connections to all peers, and removes the socket."""
        connections = [self._socket.accept()[0] for _ in range(peers)]
        self._socket.close()
        self._folder.cleanup()
        return connections


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    return connection


def _received_memories(connection: socket.socket, count: int) -> list[MessageMemory]:
    _, descriptors, _, _ = socket.recv_fds(connection, len(READY), count)
    if len(descriptors) < count:
        raise ConnectionResetError("the peer has ended before it sent its memory")
    return [MessageMemory(descriptor) for descriptor in descriptors]


# ---------------------------------------------------------------- coordinator to leading rank


class StepListener:
    """The rank's end of the link; serves one caller."""

    def __init__(self) -> None:
        self._listener = Listener()
        self.path = self._listener.path

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        """Answers messages until the caller disconnects. Closes the connection and raises if `answer` raises."""
        (caller,) = self._listener.accept(1)
        with caller:
            requests, answers = _received_memories(caller, 2)
            while len(notice := caller.recv(NOTICE.size, socket.MSG_WAITALL)) == NOTICE.size:
                caller.sendall(answers.write(answer(requests.read(notice))))


class StepCaller(asyncio.Protocol):
    """The coordinator's end of the link; makes one call at a time.

    A request is sent before `call` returns, so that the caller can work while the rank computes.
    """

    def __init__(self, requests: MessageMemory, answers: MessageMemory) -> None:
        self._requests = requests
        self._answers = answers
        self._transport: asyncio.Transport | None = None
        self._notice = b""
        self._answer: asyncio.Future[bytes] | None = None

    @classmethod
    async def dial(cls, path: str) -> "StepCaller":
        connection = _connected(path)
        memories = [new_memory(), new_memory()]
        socket.send_fds(connection, [READY], memories)
        requests, answers = map(MessageMemory, memories)
        loop = asyncio.get_running_loop()
        _, caller = await loop.create_unix_connection(lambda: cls(requests, answers), sock=connection)
        return caller

    def call(self, message: bytes) -> asyncio.Future[bytes]:
        """Sends a request and returns a future of its answer, which raises ConnectionError if the rank has failed."""
        assert self._answer is None or self._answer.done(), "the previous call must be answered first"
        assert self._transport is not None, "dial first"
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._answer.set_exception(ConnectionResetError("the rank has closed the connection"))
        else:
            self._transport.write(self._requests.write(message))
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        self._notice += data
        if len(self._notice) == NOTICE.size:
            answer = self._answers.read(self._notice)
            self._notice = b""
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the rank has closed the connection"))


# ---------------------------------------------------------------- leading rank to its followers


class FollowersLink:
    """The leading rank's end of the link to its followers."""

    def __init__(self, followers: Sequence[socket.socket]) -> None:
        self._followers = followers
        memory = new_memory()
        for follower in followers:
            socket.send_fds(follower, [READY], [memory])
        self._memory = MessageMemory(memory)

    def send(self, message: bytes) -> None:
        """Sends a message to all followers. Raises ConnectionError if one has ended."""
        for follower in self._followers:
            if not follower.recv(len(READY)):  # waits until it has read the previous message
                raise ConnectionResetError("a following rank has ended")
        notice = self._memory.write(message)
        for follower in self._followers:
            follower.sendall(notice)


class LeaderLink:
    """A follower's end of the link to the leading rank."""

    def __init__(self, path: str) -> None:
        self._leader = _connected(path)
        (self._memory,) = _received_memories(self._leader, 1)

    def receive(self) -> bytes:
        """Waits for the next message. Raises ConnectionError if the leading rank has ended."""
        self._leader.sendall(READY)
        notice = self._leader.recv(NOTICE.size, socket.MSG_WAITALL)
        if len(notice) < NOTICE.size:
            raise ConnectionResetError("the leading rank has ended")
        return self._memory.read(notice)
