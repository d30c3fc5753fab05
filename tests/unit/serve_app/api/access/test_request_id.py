"""Tests request ids with and without Serve's proxy."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
import pytest_asyncio
from ray.serve._private.http_util import RequestIdMiddleware

from cluster.routing.ledger import Ended
from protos.messages import Finish
from serve_app.api.access import REQUEST_ID, ServeRequestIds
from serve_app.api.text import TextCodec
from tests.asgi_front import MODEL, AsgiFront, asgi_front, http_client, operators_client

COMPLETION = {"model": MODEL, "prompt": "hi"}


@pytest_asyncio.fixture
async def front(codec: TextCodec) -> AsyncIterator[AsgiFront]:
    """Serves like a router; clients connect without a proxy, as on the admin port."""
    async with asgi_front(codec) as front:
        front.plays([*front.emits("a"), Ended(Finish.STOP)])
        front.app.add_middleware(ServeRequestIds)
        yield front


@pytest_asyncio.fixture
async def behind_serve(front: AsgiFront) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(RequestIdMiddleware(front.app)) as http:
        yield http


@pytest_asyncio.fixture
async def before_no_proxy(front: AsgiFront) -> AsyncIterator[httpx.AsyncClient]:
    async with operators_client(front.app) as http:
        yield http


async def named(http: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[str, str]:
    """Returns the response's only request id header, and the last part of the response's id."""
    answer = await http.post("/v1/completions", json={**COMPLETION, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    (header,) = answer.headers.get_list(REQUEST_ID)
    return header, answer.json()["id"].removeprefix("cmpl-")


async def test_ids_behind_serves_proxy(
    behind_serve: httpx.AsyncClient,
) -> None:
    header, suffix = await named(behind_serve, {}, {})
    assert header == suffix
    header, suffix = await named(behind_serve, {"request_id": "job-7"}, {})
    assert suffix == "job-7" != header
    assert await named(behind_serve, {}, {REQUEST_ID: "job-8"}) == ("job-8", "job-8")
    assert await named(behind_serve, {"request_id": "job-7"}, {REQUEST_ID: "job-8"}) == ("job-8", "job-7")


async def test_ids_without_a_proxy(
    before_no_proxy: httpx.AsyncClient,
) -> None:
    header, suffix = await named(before_no_proxy, {}, {})
    assert header == suffix
    assert await named(before_no_proxy, {"request_id": "job-7"}, {}) == ("job-7", "job-7")
    assert await named(before_no_proxy, {}, {REQUEST_ID: "job-8"}) == ("job-8", "job-8")
    assert await named(before_no_proxy, {"request_id": "job-7"}, {REQUEST_ID: "job-8"}) == ("job-8", "job-7")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_utility_endpoints_have_request_ids(before_no_proxy: httpx.AsyncClient, path: str) -> None:
    body = {"tokens": [1]} if path == "/detokenize" else {"prompt": "hi"}
    for headers in ({}, {REQUEST_ID: "job-8"}):
        answer = await before_no_proxy.post(path, json=body, headers=headers)
        (name,) = answer.headers.get_list(REQUEST_ID)
        assert name == headers.get(REQUEST_ID, name) != ""
    strange = await before_no_proxy.post(path, json=body, headers={REQUEST_ID: "a b"})
    assert (strange.status_code, strange.json()["error"]["param"]) == (400, REQUEST_ID)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {**COMPLETION, "stream": True}, 200),
        ("/v1/completions", {}, 400),
        ("/v1/nothing", {}, 404),
        ("/tokenize", {"prompt": "hi"}, 200),
        ("/detokenize", {}, 400),
    ],
)
async def test_streams_and_errors_have_one_request_id(
    behind_serve: httpx.AsyncClient, path: str, body: Mapping[str, Any], status: int
) -> None:
    answer = await behind_serve.post(path, json=body, headers={REQUEST_ID: "job-8"})
    assert (answer.status_code, answer.headers.get_list(REQUEST_ID)) == (status, ["job-8"])
