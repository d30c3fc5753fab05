"""HTTP access: API keys and their limits, the admin port, request ids and CORS.

This middleware runs before all endpoints. `AuthMiddleware` resolves the API key to a `Caller`, which counts the
caller's sessions in flight. Admin endpoints (`/metrics` and the live page) can have a separate port; the public port
then answers 404 for them.
"""

import asyncio
import contextlib
import hashlib
import hmac
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.config_sections import ApiKey
from cluster.errors import INVALID_VALUE, CapacityError, ConfigError, RequestError
from cluster.routing.ledger import Generation
from serve_app.api.replies import ErrorDetail, error_response
from serve_app.api.request_schemas import REQUEST_ID_PATTERN, GenerationRequest


@dataclass(eq=False)
class Caller:
    """Client with one API key. Without configured keys, all clients share one `Caller`."""

    name: str | None = None
    max_sessions: int | None = None
    max_tokens: int | None = None
    cache_salt: str = ""
    learn: bool = True  # False: never use this caller's requests as training examples
    sessions: int = 0  # sessions in flight

    @contextmanager
    def exchange(self) -> Iterator["Exchange"]:
        """Opens an exchange, whose sessions count against the key's limit until the block ends."""
        exchange = Exchange(self)
        try:
            yield exchange
        finally:
            self.sessions -= exchange.sessions

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError if the request asks for more tokens than the key allows."""
        for name, limit in request.token_limits.items():
            if self.max_tokens is not None and limit > self.max_tokens:
                message = f"{name} is {limit}, expected at most {self.max_tokens}, the limit of this key"
                raise RequestError(message, name, INVALID_VALUE)

    def bounded(self, generations: Sequence[Generation]) -> list[Generation]:
        """Applies the key's limits to sessions; keys and adapters share no cached pages."""
        return [self._bounded(one) for one in generations]

    def _bounded(self, one: Generation) -> Generation:
        most = one.max_len if self.max_tokens is None else len(one.prompt) + self.max_tokens
        salt = _combined(f"adapter {one.adapter}", one.cache_salt) if one.adapter else one.cache_salt
        salt = _combined(self.cache_salt, salt) if self.cache_salt else salt
        return replace(one, max_len=min(one.max_len, most), cache_salt=salt)


@dataclass(eq=False)
class Exchange:
    """One request from a caller, and its number of sessions in flight."""

    caller: Caller
    sessions: int = 0

    def take(self, sessions: int) -> None:
        """Adds sessions to the request. Raises CapacityError or RequestError if the key's limit is exceeded."""
        most = self.caller.max_sessions
        if most is not None and sessions > most:
            message = f"n: {sessions} sessions requested, expected at most {most}, the limit of this key"
            raise RequestError(message, "n", INVALID_VALUE)
        if most is not None and self.caller.sessions + sessions > most:
            raise CapacityError(f"this key has {self.caller.sessions} of {most} sessions in flight; try again later")
        self.caller.sessions += sessions
        self.sessions += sessions


@dataclass(frozen=True)
class Callers:
    """Maps API key digests to callers."""

    by_digest: Mapping[bytes, Caller] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: Mapping[str, ApiKey]) -> "Callers":
        return cls({bytes.fromhex(key.sha256): _caller(name, key) for name, key in keys.items()})

    @property
    def need_keys(self) -> bool:
        return bool(self.by_digest)

    def find(self, key: str) -> Caller | None:
        """Returns the key's caller. Compares every stored digest in full, so timing reveals nothing about keys."""
        digest = hashlib.sha256(key.encode()).digest()
        matches = [caller for stored, caller in self.by_digest.items() if hmac.compare_digest(stored, digest)]
        return matches[0] if matches else None


def _caller(name: str, key: ApiKey) -> Caller:
    salt = f"key {name}" if key.cache_salt is None else f"salt {key.cache_salt}"
    return Caller(name, key.max_sessions, key.max_tokens, salt, key.learn)


def _combined(outer: str, inner: str) -> str:
    """Hashes two salts into one; the result reveals neither and has a fixed length."""
    return hashlib.sha256(f"{outer}\n{inner}".encode()).hexdigest()


def path_of(scope: Scope) -> str:
    """Returns the path within the application, without the prefix of Serve's `route_prefix`."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


ADMIN_PATHS = frozenset({"/", "/metrics"})
ADMIN_FOLDER = "/page/"
ADMIN_PORT = "slipstream.admin"  # ASGI scope key; set on requests to the admin port
BACKLOG = 128
SHUTDOWN_S = 5


class AdminPort:
    """Restricts admin endpoints to the admin port; other ports answer 404."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and ADMIN_PORT not in scope:
            path = path_of(scope)
            if path in ADMIN_PATHS or path.startswith(ADMIN_FOLDER):
                await _admin_only(path)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AdminAddress:
    """Serves the whole application, admin endpoints included, on a separate port.

    All routers on a machine share the port; any of them may answer.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """Starts listening. Raises ConfigError if the address is not available."""
        self._app = app
        listener = _listen(host, port)
        self.port: int = listener.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                self, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=SHUTDOWN_S
            )
        )
        self._work = asyncio.create_task(self._server.serve([listener]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, ADMIN_PORT: True}, receive, send)

    async def close(self) -> None:
        """Stops listening and waits briefly for running requests."""
        self._server.should_exit = True
        await self._work


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process that embeds this server."""
        yield


def _admin_only(path: str) -> Response:
    message = f"{path} is only served on the admin address; see server.admin"
    detail = ErrorDetail(message=message, type="invalid_request_error", code="not_found")
    return error_response(404, detail)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True)
    except OSError as error:
        raise ConfigError(f"server.admin: cannot listen on {host}:{port}: {error.strerror}") from error


class CrossOrigin(CORSMiddleware):
    """Answers CORS preflight requests."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Returns Starlette's preflight response, with refusals in OpenAI's error format."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        message = bytes(answer.body).decode()
        headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        detail = ErrorDetail(message=message, type="invalid_request_error", code="cross_origin")
        return error_response(answer.status_code, detail, headers)


OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/metrics", "/version", "/openapi.json", "/docs", "/"}
)
OPEN_FILES = re.compile(r"/page/[^/]+\.(js|css|svg)")  # public: the page itself asks for an API key
READING_METHODS = frozenset({"GET", "HEAD"})
CALLER = "slipstream.caller"  # ASGI scope key of the caller
SCHEME = "bearer"


class AuthMiddleware:
    """Stores the caller in the ASGI scope; answers 401 without a valid key."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers
        self._anonymous = Caller()

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
            return self._anonymous
        key = _key_of(scope)
        return None if key is None else self._callers.find(key)


def _is_open(scope: Scope) -> bool:
    path = path_of(scope)
    return scope["method"] in READING_METHODS and (path in OPEN_PATHS or OPEN_FILES.fullmatch(path) is not None)


def _key_of(scope: Scope) -> str | None:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == SCHEME and key.strip() else None


def _refusal(scope: Scope) -> Response:
    if _key_of(scope) is None:
        message = "No API key given; send the header Authorization: Bearer KEY"
    else:
        message = "Incorrect API key"
    detail = ErrorDetail(message=message, type="invalid_request_error", code="invalid_api_key")
    return error_response(401, detail, {"WWW-Authenticate": "Bearer"})


REQUEST_ID = "X-Request-Id"


def request_id_of(request: Request) -> str | None:
    """Returns the header's request id, or None if invalid. Serve's proxy sets the header if the client does not."""
    name = request.headers.get(REQUEST_ID, "")
    return name if re.fullmatch(REQUEST_ID_PATTERN, name) else None


def check_request_id(request: Request) -> None:
    """Raises RequestError if the header is not a valid request id."""
    if REQUEST_ID in request.headers and request_id_of(request) is None:
        raise RequestError(f"{REQUEST_ID} must be 1 to 128 characters from A-Za-z0-9_.:-", REQUEST_ID)


class ServeRequestIds:
    """Removes the request id header from responses, since Serve's proxy adds it. The admin port has no proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[REQUEST_ID]
            await send(message)

        await self._app(scope, receive, send if ADMIN_PORT in scope else send_without_id)
