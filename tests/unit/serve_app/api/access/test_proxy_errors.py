"""Errors of Serve's proxy have OpenAI's format, tested with Serve's own code."""

from collections.abc import Mapping, Sequence

import httpx
import pytest
from ray.serve._private.common import DeploymentID
from ray.serve._private.http_util import (
    _apply_middlewares,
    convert_object_to_asgi_messages,
    get_http_response_status,
    send_http_response_on_exception,
    validate_http_proxy_callback_return,
)
from ray.serve._private.utils import call_function_from_import_path
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.proxy_errors import PROXY_ENVIRONMENT
from tests.asgi_front import http_client

FULL = BackPressureError(7, 7, status_code=429, retry_after_s=1)
NONE_THERE = DeploymentUnavailableError(DeploymentID("Router", "slipstream"))


def by_proxy(error: Exception) -> list[Message]:
    """Returns Serve's own response for an error."""
    return send_http_response_on_exception(get_http_response_status(error, 2, "job-7"), response_started=False)


SERVED = convert_object_to_asgi_messages({"/": "slipstream"})


async def converted(
    path: str,
    messages: Sequence[Message],
    headers: Mapping[str, str] | None = None,
    routes: Sequence[Message] = SERVED,
) -> httpx.Response:
    """Returns the client's response if the proxy sends the given one."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        for message in routes if scope["path"] == "/-/routes" else messages:
            await send(message)

    (callback,) = PROXY_ENVIRONMENT.values()
    around = validate_http_proxy_callback_return(call_function_from_import_path(callback))
    async with http_client(_apply_middlewares(proxy, around)) as http:
        return await http.post(path, headers=headers)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "says"),
    [
        (FULL, 429, "rate_limit_error", "capacity", "max_queued_requests=7"),
        (TimeoutError(), 408, "server_error", "request_timeout", "job-7 timed out after 2s"),
        (NONE_THERE, 503, "server_error", "unavailable", "failed to deploy"),
    ],
)
async def test_proxy_errors_have_openais_form(error: Exception, status: int, kind: str, code: str, says: str) -> None:
    answer = await converted("/v1/completions", by_proxy(error), {"X-Request-Id": "job-7"})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get_list("X-Request-Id") == ["job-7"]
    assert answer.headers.get("retry-after") == (None if status == 408 else "1")
    found = answer.json()["error"]
    assert (found["type"], found["param"], found["code"]) == (kind, None, code)
    assert says in found["message"]


NOT_FOUND = convert_object_to_asgi_messages("Path '/v1/models' not found.", 404)


async def test_an_unknown_path_is_not_found() -> None:
    answer = await converted("/v1/models", NOT_FOUND)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize(
    "routes", [convert_object_to_asgi_messages({}), convert_object_to_asgi_messages("no routes yet", 503)]
)
async def test_every_path_is_unavailable_without_an_application(routes: list[Message]) -> None:
    answer = await converted("/v1/models", NOT_FOUND, routes=routes)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "starting or stopping" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"


async def test_serves_own_endpoints_are_unchanged() -> None:
    answer = await converted("/-/healthz", convert_object_to_asgi_messages("draining", 503))
    assert (answer.status_code, answer.text) == (503, "draining")
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize("status", [200, 404, 429, 503])
async def test_router_responses_pass_through(status: int) -> None:
    answer = await converted("/v1/completions", convert_object_to_asgi_messages({"error": "by a router"}, status))
    assert (answer.status_code, answer.json()) == (status, {"error": "by a router"})
    assert "retry-after" not in answer.headers


async def test_stream_events_pass_through() -> None:
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    parts = [{"type": "http.response.body", "body": part, "more_body": part != b"c"} for part in (b"a", b"b", b"c")]
    answer = await converted("/v1/completions", [start, *parts])
    assert answer.text == "abc"
