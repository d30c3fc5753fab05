"""Admin endpoints are served only on the admin port."""

import hashlib

import httpx
import pytest

from serve_app.api.text import TextCodec
from serve_app.page.routes import PageWatch, Sample, page_routes
from tests.asgi_front import MODEL, asgi_front, operators_client, prefixed_client

KEY = "sk-ann"
THEIRS = ("/metrics", "/", "/page/state", "/page/page.js")
EVERYBODYS = ("/health", "/v1/models", "/version", "/docs")
APART = {"admin": {"port": 9400}}


async def samples() -> list[Sample]:
    return []


async def statuses(http: httpx.AsyncClient, paths: tuple[str, ...]) -> set[int]:
    return {(await http.get(path)).status_code for path in paths}


async def test_admin_endpoints_are_served_only_on_the_admin_port(codec: TextCodec) -> None:
    page = page_routes(PageWatch(MODEL, samples))
    async with asgi_front(codec, APART, further=page) as front, operators_client(front.app) as theirs:
        assert await statuses(front.http, THEIRS) == {404}
        assert await statuses(front.http, EVERYBODYS) == {200}
        assert await statuses(theirs, THEIRS + EVERYBODYS) == {200}
        error = (await front.http.get("/metrics")).json()["error"]
        assert "server.admin" in error["message"]


async def test_admin_endpoints_below_a_route_prefix_are_served_only_on_the_admin_port(codec: TextCodec) -> None:
    page = page_routes(PageWatch(MODEL, samples))
    async with asgi_front(codec, APART, further=page) as front, prefixed_client(front.app, "/llm") as prefixed:
        assert await statuses(prefixed, THEIRS) == {404}
        assert await statuses(prefixed, EVERYBODYS) == {200}


async def test_without_an_admin_port_all_endpoints_share_one(codec: TextCodec) -> None:
    page = page_routes(PageWatch(MODEL, samples))
    async with asgi_front(codec, further=page) as front:
        assert await statuses(front.http, THEIRS + EVERYBODYS) == {200}


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"Authorization": f"Bearer {KEY}"}, 200)])
async def test_the_admin_port_requires_keys(codec: TextCodec, headers: dict[str, str], status: int) -> None:
    keys = {"keys": {"ann": {"sha256": hashlib.sha256(KEY.encode()).hexdigest()}}}
    page = page_routes(PageWatch(MODEL, samples))
    async with asgi_front(codec, APART | keys, key=KEY, further=page) as front, operators_client(front.app) as theirs:
        assert (await theirs.get("/page/state", headers=headers)).status_code == status
        assert (await front.http.get("/page/state", headers=headers)).status_code == 404
        assert (await theirs.get("/metrics")).status_code == 200
