"""Server-sent event streams, JSON responses and client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api.failures import Failure, failure_of
from serve_app.api.limits import Deadline, RequestTimeoutError
from serve_app.api.observability import RequestRecord

T = TypeVar("T")


LAST_EVENT_S = 1.0  # seconds allowed to send the last event after a deadline
KEEP_ALIVE = ": keep-alive\n\n"  # an SSE comment, which clients ignore


class EventStream(Response):
    """Sends events as they arrive, and keep-alive comments. Closes the source when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[str],
        events: AsyncGenerator[str, None],
        record: RequestRecord,
        keep_alive_s: float,
        deadline: Deadline,
        as_failure: Callable[[Failure], str],
    ) -> None:
        """`first` is a completed or pending future of the first event."""
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._record = record
        self._keep_alive_s = keep_alive_s
        self._deadline = deadline
        self._as_failure = as_failure
        self._is_quiet = True  # no event since the last check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events), _ended(self._first):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with self._deadline.enforced():
                async with _ended(asyncio.create_task(self._keep_alive(send))):
                    async for event in self._guarded():
                        self._is_quiet = False
                        await _send_part(send, event)
                await _send_part(send, "", more=False)
        except RequestTimeoutError as error:
            with suppress(TimeoutError):  # raised if the client has stopped reading
                async with asyncio.timeout(LAST_EVENT_S):
                    await _send_part(send, self._failed(error))
                    await _send_part(send, "", more=False)

    async def _keep_alive(self, send: Send) -> None:
        """Sends comments while idle. A separate task adds no cost to each event."""
        while True:
            await asyncio.sleep(self._keep_alive_s)
            if self._is_quiet:
                await _send_part(send, KEEP_ALIVE)
            self._is_quiet = True

    async def _guarded(self) -> AsyncGenerator[str, None]:
        """Yields all events; converts a failure into a final event."""
        try:
            yield await self._first
            async for event in self._events:
                yield event
            self._record.status = 200
        except Exception as error:  # noqa: BLE001  # every failure becomes the last event
            yield self._failed(error)

    def _failed(self, error: Exception) -> str:
        failure = failure_of(error)
        self._record.status = failure.status  # logged only: the response already has status 200
        return self._as_failure(failure)


async def first_of(events: AsyncGenerator[str, None], receive: Receive, wait_s: float) -> asyncio.Future[str]:
    """Returns a future of the first event, pending after `wait_s` seconds. On failure, closes the source and raises."""
    first = asyncio.ensure_future(anext(events))
    try:
        await while_connected(receive, asyncio.wait((first,), timeout=wait_s))
        if first.done():
            first.result()
    except BaseException:
        async with aclosing(events), _ended(first):
            raise
    return first


@asynccontextmanager
async def _ended(task: asyncio.Future[Any]) -> AsyncGenerator[None, None]:
    """Cancels `task` when the block ends."""
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


def as_event(data: str) -> str:
    """Formats a server-sent event."""
    return f"data: {data}\n\n"


def as_json(body: BaseModel, status: int = 200) -> Response:
    """Returns a JSON response."""
    return Response(body.model_dump_json(), status, media_type="application/json")


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits `work`; cancels it and raises ClientDisconnect if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect("the client disconnected")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _disconnect(receive: Receive) -> None:
    """Returns once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
