"""Tests event streams: comments while idle, failures before and after the first event, and client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from cluster.errors import TargetLostError
from serve_app.api import streaming
from serve_app.api.failures import Failure
from serve_app.api.limits import Deadline
from serve_app.api.metrics import RequestRecord
from serve_app.api.streaming import KEEP_ALIVE, EventStream, first_of

SOON_S = 0.001  # idle time before a keep-alive comment
NEVER_S = 1e6


class Listener:
    """Client that records received data, and signals each event."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.received: dict[str, asyncio.Event] = {}
        self.leaves = asyncio.Event()

    def wait_for(self, text: str) -> Awaitable[Any]:
        return self.received.setdefault(text, asyncio.Event()).wait()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            text = message["body"].decode()
            self.bodies.append(text)
            self.received.setdefault(text, asyncio.Event()).set()

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}


def as_failure(failure: Failure) -> str:
    return f"failed: {failure.detail.code}"


async def stream(
    events: AsyncGenerator[str, None], client: Listener, keep_alive_s: float, limit_s: float | None = None
) -> RequestRecord:
    record = RequestRecord()
    deadline = Deadline.within(limit_s)
    first = await first_of(events, client.receive, keep_alive_s)
    await EventStream(first, events, record, keep_alive_s, deadline, as_failure)({}, client.receive, client.send)
    return record


async def sent_by(make: Callable[[Listener], AsyncGenerator[str, None]], keep_alive_s: float) -> list[str]:
    client = Listener()
    async with asyncio.timeout(20):
        await stream(make(client), client, keep_alive_s)
    assert client.bodies[-1] == ""
    return client.bodies[:-1]


async def test_events_are_sent_unchanged() -> None:
    async def events(_: Listener) -> AsyncGenerator[str, None]:
        yield "a"
        yield "b"

    assert await sent_by(events, NEVER_S) == ["a", "b"]


async def test_a_comment_is_sent_in_a_pause() -> None:
    async def events(client: Listener) -> AsyncGenerator[str, None]:
        yield "a"
        await client.wait_for(KEEP_ALIVE)
        yield "b"

    bodies = await sent_by(events, SOON_S)
    assert (bodies[0], bodies[-1], set(bodies[1:-1])) == ("a", "b", {KEEP_ALIVE})


async def test_a_comment_is_sent_before_the_first_event() -> None:
    async def events(client: Listener) -> AsyncGenerator[str, None]:
        await client.wait_for(KEEP_ALIVE)
        yield "a"

    bodies = await sent_by(events, SOON_S)
    assert (bodies[0], bodies[-1]) == (KEEP_ALIVE, "a")


async def test_no_comment_follows_the_end() -> None:
    async def events() -> AsyncGenerator[str, None]:
        yield "a"

    class SlowListener(Listener):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if message.get("more_body") is False:
                with suppress(TimeoutError):
                    async with asyncio.timeout(50 * SOON_S):
                        await self.wait_for(KEEP_ALIVE)

    client = SlowListener()
    await stream(events(), client, SOON_S)
    assert client.bodies[-1] == ""


async def test_a_failure_before_the_first_event_is_raised() -> None:
    closed = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            raise TargetLostError("gone")
            yield ""
        finally:
            closed.append(True)

    with pytest.raises(TargetLostError):
        await first_of(events(), Listener().receive, NEVER_S)
    assert closed == [True]


async def test_a_failure_after_a_comment_is_an_event() -> None:
    async def events(client: Listener) -> AsyncGenerator[str, None]:
        await client.wait_for(KEEP_ALIVE)
        raise TargetLostError("gone")
        yield ""

    client = Listener()
    async with asyncio.timeout(20):
        record = await stream(events(client), client, SOON_S)
    assert record.status == 503
    assert client.bodies[-2] == "failed: target_lost"


@pytest.mark.parametrize("came", [[], ["a"]])
async def test_a_disconnect_closes_the_source(came: list[str]) -> None:
    client = Listener()
    closed = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            for event in came:
                yield event
            client.leaves.set()
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async with asyncio.timeout(20):
        with pytest.raises(ClientDisconnect):
            await stream(events(), client, NEVER_S)
    assert closed == [True]


async def test_a_stream_past_its_deadline_ends_with_an_error() -> None:
    closed = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            yield "a"
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    client = Listener()
    async with asyncio.timeout(20):
        record = await stream(events(), client, NEVER_S, limit_s=SOON_S)
    assert client.bodies == ["a", "failed: request_timeout", ""]
    assert record.status == 408
    assert closed == [True]


async def test_a_stream_within_its_deadline_has_no_error() -> None:
    async def events() -> AsyncGenerator[str, None]:
        yield "a"

    client = Listener()
    record = await stream(events(), client, NEVER_S, limit_s=NEVER_S)
    assert client.bodies == ["a", ""]
    assert record.status == 200


async def test_a_client_that_stopped_reading_is_disconnected_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "LAST_EVENT_S", SOON_S)
    closed = []

    async def events() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "a"
        finally:
            closed.append(True)

    class StalledListener(Listener):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

    client = StalledListener()
    async with asyncio.timeout(20):
        record = await stream(events(), client, NEVER_S, limit_s=SOON_S)
    assert client.bodies == ["a", "failed: request_timeout"]
    assert record.status == 408
    assert closed == [True]
