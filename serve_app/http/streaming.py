"""HTTP beyond routes: event streams, clients that disconnect."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.http.failures import failure_of
from serve_app.http.watching.records import RequestRecord

T = TypeVar("T")


class EventStream(Response):
    """Sends events as they come, and closes their source when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str, None], record: RequestRecord) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_part(send, self._first)
        async for event in self._guarded():
            await _send_part(send, event)
        await _send_part(send, "", more=False)

    async def _guarded(self) -> AsyncGenerator[str, None]:
        """The other events; a failure becomes the last one."""
        try:
            async for event in self._events:
                yield event
            self._record.status = 200
        except Exception as error:  # noqa: BLE001  # all of a request ends here: whatever failed, the client is told
            failure = failure_of(error)
            self._record.status = failure.status  # the client was told 200 long ago
            yield as_event(failure.body)


def as_event(data: str) -> str:
    """A server-sent event."""
    return f"data: {data}\n\n"


def as_json(body: BaseModel, status: int = 200) -> Response:
    """A JSON response."""
    return Response(body.model_dump_json(), status, media_type="application/json")


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits `work`; cancels it and raises ClientDisconnect when the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect("the client left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
