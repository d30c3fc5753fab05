"""Tests the links of a replica over real sockets, between threads and with a killed process."""

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from actors.engine.shared_memory import SPACE
from actors.engine.step_link import FollowersLink, LeaderLink, Listener, StepCaller, StepListener

pytestmark = pytest.mark.timeout(60)
SIZES = (0, 1, 5_000, SPACE, SPACE + 1, 3 * SPACE, 10)


class Answering:
    """Listener that serves on its own thread."""

    def __init__(self, answer: Any) -> None:
        self.raised: BaseException | None = None
        self.listener = StepListener()
        self._thread = threading.Thread(target=self._serve, args=(answer,))
        self._thread.start()

    def _serve(self, answer: Any) -> None:
        try:
            self.listener.serve(answer)
        except ZeroDivisionError as error:
            self.raised = error

    def join(self) -> None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "it serves on although nobody calls"


def message_of(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


async def test_messages_of_any_size_are_answered_in_order():
    serving = Answering(lambda message: message[::-1])
    caller = await StepCaller.dial(serving.listener.path)
    for size in SIZES:
        message = message_of(size)
        assert await caller.call(message) == message[::-1]
    caller.close()
    await asyncio.to_thread(serving.join)
    assert serving.raised is None


async def test_a_remote_failure_ends_both_sides():
    serving = Answering(lambda message: bytes([1 // len(message)]))
    caller = await StepCaller.dial(serving.listener.path)
    with pytest.raises(ConnectionError):
        await caller.call(b"")
    with pytest.raises(ConnectionError):
        await caller.call(b"later")
    caller.close()
    await asyncio.to_thread(serving.join)
    assert isinstance(serving.raised, ZeroDivisionError)


async def test_the_socket_file_is_removed_after_dialing():
    serving = Answering(lambda message: message)
    folder = Path(serving.listener.path).parent
    assert folder.stat().st_mode & 0o077 == 0, "others may not even look"
    caller = await StepCaller.dial(serving.listener.path)
    assert await caller.call(b"ready") == b"ready"
    assert not folder.exists()
    caller.close()
    await asyncio.to_thread(serving.join)


def test_the_caller_works_on_the_event_loop_of_ray() -> None:
    async def echoed() -> bytes:
        serving = Answering(lambda message: message)
        caller = await StepCaller.dial(serving.listener.path)
        answer = await caller.call(b"on uvloop")
        caller.close()
        await asyncio.to_thread(serving.join)
        return answer

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(echoed()) == b"on uvloop"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_followers_read_every_message_in_order(count):
    """No message is overwritten before all followers have read it, although the leader never waits for its own work."""
    sent = [message_of(size) + bytes([number]) for number in range(20) for size in SIZES]
    listener = Listener()

    def followed() -> list[bytes]:
        link = LeaderLink(listener.path)
        return [link.receive() for _ in sent]

    with ThreadPoolExecutor(count) as pool:
        reading = [pool.submit(followed) for _ in range(count)]
        link = FollowersLink(listener.accept(count))
        for message in sent:
            link.send(message)
        assert all(found.result() == sent for found in reading)


FOLLOWER = """
import sys
from actors.engine.step_link import LeaderLink
link = LeaderLink(sys.argv[1])
try:
    while True:
        print(link.receive().decode(), flush=True)
except ConnectionError:
    print("ended", flush=True)
"""


def following(listener: Listener) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", FOLLOWER, listener.path], stdout=subprocess.PIPE, text=True)


def test_followers_may_be_suspended_and_killed():
    """A suspended follower delays messages, a killed one fails them, and the leader's end ends all."""
    listener = Listener()
    followers = [following(listener) for _ in range(2)]
    outputs: list[Any] = [follower.stdout for follower in followers]
    connections = listener.accept(2)
    link = FollowersLink(connections)
    followers[1].send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        sending = [pool.submit(link.send, message) for message in (b"one", b"two", b"three")]
        followers[1].send_signal(signal.SIGCONT)
        assert [done.result() for done in sending] == [None] * 3
    assert [output.readline() for _ in range(3) for output in outputs] == ["one\n"] * 2 + ["two\n"] * 2 + [
        "three\n"
    ] * 2
    followers[1].kill()
    followers[1].wait()
    with pytest.raises(ConnectionError):
        link.send(b"four")
    for connection in connections:
        connection.close()
    assert outputs[0].read().split()[-1] == "ended"
    followers[0].wait()
    for output in outputs:
        output.close()
