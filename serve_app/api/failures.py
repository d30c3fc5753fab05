"""Maps exceptions to HTTP statuses and OpenAI error bodies, in one place.

RequestError         400     UnknownModelError  404     BodyTooLargeError  413     BodyTimeoutError  408
CapacityError        429     TargetLostError    503     ClientDisconnect   499
DrainingError        503     with Retry-After, as with CapacityError
RequestTimeoutError  408     with `x-should-retry: false`
NonFiniteLogitsError 500     with `x-should-retry: false`
routing errors       Starlette's status     anything else      500, logged
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import CapacityError, DrainingError, NonFiniteLogitsError, RequestError, TargetLostError
from serve_app.api.access import path_of
from serve_app.api.fields import shortened
from serve_app.api.limits import BodyTimeoutError, BodyTooLargeError, RequestTimeoutError
from serve_app.api.observability import CLIENT_LEFT
from serve_app.api.replies import RETRY_AFTER_S, ErrorBody, ErrorDetail, error_response
from serve_app.api.served_model import UnknownModelError

SHOULD_RETRY = "x-should-retry"  # header that OpenAI's clients read
MAX_MESSAGE_CHARS = 4096
LIVENESS = "/health/live"  # answered until the process ends

_ROUTING = {404: "not_found", 405: "method_not_allowed"}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """HTTP error in the form sent to the client."""

    status: int
    detail: ErrorDetail
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> str:
        return ErrorBody(error=self.detail).model_dump_json()

    @property
    def response(self) -> Response:
        return error_response(self.status, self.detail, self.headers)


def failure_of(error: Exception) -> Failure:
    """Returns the HTTP error for an exception."""
    match error:
        case RequestError():
            status, code = _fault(error)
            return Failure(status, _detail(error, "invalid_request_error", code, error.field))
        case CapacityError():
            detail = _detail(error, "rate_limit_error", "capacity")
            return Failure(429, detail, {"Retry-After": str(RETRY_AFTER_S)})
        case DrainingError():
            return Failure(503, _detail(error, "server_error", "draining"), {"Retry-After": str(RETRY_AFTER_S)})
        case RequestTimeoutError():
            return Failure(408, _detail(error, "server_error", "request_timeout"), {SHOULD_RETRY: "false"})
        case TargetLostError():
            return Failure(503, _detail(error, "server_error", "target_lost"))
        case NonFiniteLogitsError():
            return Failure(500, _detail(error, "server_error", "non_finite_logits"), {SHOULD_RETRY: "false"})
        case ClientDisconnect():
            return Failure(CLIENT_LEFT, _detail(error, "client_left"))
        case HTTPException():
            headers = error.headers or {}
            methods = headers.get("Allow")
            detail = ErrorDetail(
                message=error.detail if methods is None else f"{error.detail}; allowed methods: {methods}",
                type="invalid_request_error",
                code=_ROUTING.get(error.status_code),
            )
            return Failure(error.status_code, detail, headers)
        case _:
            redacted = RuntimeError(f"{type(error).__name__}; message omitted, since it may quote a prompt")
            traceback = error.__traceback__
            _logger.error("a request failed unexpectedly", exc_info=(RuntimeError, redacted, traceback))
            message = "internal error; see the server's log"
            return Failure(500, ErrorDetail(message=message, type="server_error", code="internal_error"))


def _fault(error: RequestError) -> tuple[int, str | None]:
    match error:
        case UnknownModelError():
            return 404, "model_not_found"
        case BodyTooLargeError():
            return 413, "body_too_large"
        case BodyTimeoutError():
            return 408, "body_timeout"
        case _:
            return 400, error.code


def _detail(error: Exception, kind: str, code: str | None = None, param: str | None = None) -> ErrorDetail:
    return ErrorDetail(message=shortened(str(error), MAX_MESSAGE_CHARS), type=kind, code=code, param=param)


class RefuseWhenStopped:
    """Answers every path but /health/live with 503 until Serve stops the process."""

    def __init__(self, app: ASGIApp, has_stopped: Callable[[], bool]) -> None:
        self._app = app
        self._has_stopped = has_stopped

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) != LIVENESS and self._has_stopped():
            refusal = failure_of(DrainingError("this server is stopping; try again later"))
            await refusal.response(scope, receive, send)
        else:
            await self._app(scope, receive, send)
