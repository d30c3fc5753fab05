"""Tests the coordinator's RPC to its leading rank over a real socket between two threads."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from actors.engine.step_socket import StepCaller, StepListener


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


async def test_messages_of_any_size_are_answered_in_order():
    serving = Answering(lambda message: message[::-1])
    caller = await StepCaller.dial(serving.listener.path)
    for size in (0, 1, 1_000_000):
        message = bytes(number % 251 for number in range(size))
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
