"""Converts errors of Serve's proxy to OpenAI's error format.

The proxy answers in plain text if all routers are full or none is running. It loads this middleware if an environment
variable of its node names it.
"""

import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.replies import RETRY_AFTER_S, ErrorDetail, error_response

# Serve reads this variable at start, from the environment of `ray start` or of the process that starts Ray.
PROXY_ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.middlewares"}
SERVE_PREFIX = "/-/"  # prefix of Serve's own health and status routes
ROUTES = "/-/routes"  # lists applications by route prefix
UNAVAILABLE_MESSAGE = b"the server is starting or stopping; try again later"
KINDS = {  # OpenAI's error type and code by HTTP status
    404: ("invalid_request_error", "not_found"),
    408: ("server_error", "request_timeout"),
    429: ("rate_limit_error", "capacity"),
    503: ("server_error", "unavailable"),
}
TRANSIENT = frozenset({429, 503})


def middlewares() -> list[Middleware]:
    """Returns the middleware that Serve adds to its proxy."""
    return [Middleware(ProxyErrors)]


class ProxyErrors:
    """Rewrites the proxy's plain-text errors. Router responses pass unchanged: their errors are never plain text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(SERVE_PREFIX):
            await self._app(scope, receive, send)
            return
        proxy_start: Message | None = None  # start of a response made by the proxy itself

        async def send_converted(message: Message) -> None:
            nonlocal proxy_start
            if message["type"] == "http.response.start" and _is_by_proxy(message):
                proxy_start = message
            elif proxy_start is not None:
                words = message["body"]
                if proxy_start["status"] == 404 and not await self._serves(scope):
                    proxy_start = {**proxy_start, "status": 503}
                    words = UNAVAILABLE_MESSAGE
                await _as_openai_error(proxy_start, words)(scope, receive, send)
            else:
                await send(message)

        await self._app(scope, receive, send_converted)

    async def _serves(self, scope: Scope) -> bool:
        """Returns whether any application is deployed; a removed application has no route."""
        messages: list[Mapping[str, Any]] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        root = scope.get("root_path", "")
        await self._app(
            {**scope, "method": "GET", "path": root + ROUTES, "raw_path": (root + ROUTES).encode()},
            _receive_empty,
            collect,
        )
        if messages[0]["status"] != 200:
            return False
        return bool(json.loads(b"".join(message.get("body", b"") for message in messages)))


async def _receive_empty() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _is_by_proxy(start: Message) -> bool:
    return start["status"] in KINDS and Headers(raw=start["headers"]).get("content-type", "").startswith("text/plain")


def _as_openai_error(start: Message, words: bytes) -> Response:
    status = start["status"]
    kind, code = KINDS[status]
    headers = {name: text for name, text in Headers(raw=start["headers"]).items() if not name.startswith("content-")}
    if status in TRANSIENT:
        headers.setdefault("retry-after", str(RETRY_AFTER_S))
    detail = ErrorDetail(message=words.decode(errors="replace"), type=kind, code=code)
    return error_response(status, detail, headers)
