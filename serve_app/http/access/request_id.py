"""What a request is called in its answer's header: by its client, by Serve's proxy, or here."""

import re

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import RequestError
from serve_app.http.access.admin_port import OPERATORS
from serve_app.http.wire.schemas import REQUEST_ID_PATTERN

REQUEST_ID = "X-Request-Id"


def asked_name(request: Request) -> str | None:
    """What the request's header calls it. Behind Serve there always is one, and nothing tells whether a client's."""
    name = request.headers.get(REQUEST_ID, "")
    return name if re.fullmatch(REQUEST_ID_PATTERN, name) else None


def check_name(request: Request) -> None:
    """Refuses a header that is no name."""
    if REQUEST_ID in request.headers and asked_name(request) is None:
        raise RequestError(f"{REQUEST_ID} is not a plain name of 1 to 128 characters", REQUEST_ID)


class NamedByServe:
    """Leaves the header to Serve's proxy, which adds one to every answer; before the operators' address is no proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unnamed(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[REQUEST_ID]
            await send(message)

        await self._app(scope, receive, send if OPERATORS in scope else send_unnamed)
