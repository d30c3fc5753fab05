"""What concerns operators, and the address of their own that they may have: elsewhere it is not to be found then."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import ConfigError
from serve_app.http.wire.replies import ErrorDetail, error_response

PATHS = frozenset({"/", "/metrics"})
FOLDER = "/page/"
OPERATORS = "slipstream.operators"  # in an ASGI scope: it came to their address
BACKLOG = 128
LAST_ANSWERS_S = 5


class OperatorsDoor:
    """Answers 404 to whoever asks for what is the operators' at another address than theirs."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and OPERATORS not in scope and _is_theirs(scope["path"]):
            await _elsewhere(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class OperatorsAddress:
    """Serves the whole application, the operators' part included, on a port of its own.

    Routers on one machine share the port, for it makes no difference which of them answers.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """Listens at once, and answers as soon as the event loop lets it; raises ConfigError where it cannot."""
        self._app = app
        listening = _listening(host, port)
        self.port: int = listening.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                self, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=LAST_ANSWERS_S
            )
        )
        self._work = asyncio.create_task(self._server.serve([listening]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, OPERATORS: True}, receive, send)

    async def close(self) -> None:
        """Takes no more, and returns once what came is answered, if that does not take long."""
        self._server.should_exit = True
        await self._work


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the process that this is a part of."""
        yield


def _is_theirs(path: str) -> bool:
    return path in PATHS or path.startswith(FOLDER)


def _elsewhere(path: str) -> Response:
    message = f"{path} is answered at another address, which server.operators names"
    detail = ErrorDetail(message=message, type="invalid_request_error", code="not_found")
    return error_response(404, detail)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True)
    except OSError as error:
        raise ConfigError(f"server.operators: nothing can listen on {host}:{port}: {error.strerror}") from error
