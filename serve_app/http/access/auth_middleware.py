"""The door: lets through who shows a key, and everybody to what concerns nobody's prompts."""

import re

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.http.access.callers import Caller, Callers
from serve_app.http.wire.replies import ErrorDetail, error_response

OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/metrics", "/version", "/openapi.json", "/docs", "/"}
)
OPEN_FILES = re.compile(r"/page/[^/]+\.(js|css|svg)")  # of the live page, which asks for a key itself
READING = frozenset({"GET", "HEAD"})
CALLER = "slipstream.caller"  # in an ASGI scope
SCHEME = "bearer"


class KeyGuard:
    """Puts the caller into the scope, or answers 401. Whoever is behind it finds a caller in every scope."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers
        self._anybody = Caller()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._caller(scope)
        if caller is None:
            await _refusal(scope)(scope, receive, send)
            return
        scope[CALLER] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if not self._callers.need_keys or _is_open(scope):
            return self._anybody
        key = _shown_key(scope)
        return None if key is None else self._callers.find(key)


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    return scope["method"] in READING and (path in OPEN_PATHS or OPEN_FILES.fullmatch(path) is not None)


def _shown_key(scope: Scope) -> str | None:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == SCHEME and key.strip() else None


def _refusal(scope: Scope) -> Response:
    if _shown_key(scope) is None:
        message = "an API key is needed; send it as a header, Authorization: Bearer KEY"
    else:
        message = "the API key is not known here"
    detail = ErrorDetail(message=message, type="invalid_request_error", code="invalid_api_key")
    return error_response(401, detail, {"WWW-Authenticate": "Bearer"})
