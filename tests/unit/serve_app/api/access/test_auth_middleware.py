"""Tests authentication with OpenAI's client."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
import pytest_asyncio

from cluster.routing.ledger import Ended
from protos.messages import Finish
from serve_app.api.text import TextCodec
from serve_app.page.routes import PageWatch, Sample, page_routes
from tests.asgi_front import MODEL, AsgiFront, asgi_front, prefixed_client
from tests.scripted_generator import STALL

KEY = "sk-ann"
KEYS = {"ann": {"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "max_tokens": 5, "max_sessions": 2}}
ASKED = {"model": MODEL, "prompt": "hi"}


@pytest_asyncio.fixture
async def front(codec: TextCodec) -> AsyncIterator[AsgiFront]:
    async with asgi_front(codec, {"keys": KEYS}, key=KEY) as front:
        front.plays([Ended(Finish.STOP)])
        yield front


async def test_a_valid_key_is_served_within_its_limits(front: AsgiFront) -> None:
    await front.openai.completions.create(**ASKED, max_tokens=4)
    await front.openai.completions.create(**ASKED)
    assert [one.max_len - len(one.prompt) for one in front.generator.generations] == [4, 5]
    with pytest.raises(openai.BadRequestError) as caught:
        await front.openai.completions.create(**ASKED, max_tokens=6)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError):
        await front.openai.completions.create(**ASKED, n=3)


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]})])
async def test_utility_requests_count_toward_a_keys_limit(front: AsgiFront, path: str, fields: Any) -> None:
    front.plays([STALL])
    shown = {"Authorization": f"Bearer {KEY}"}
    for _ in range(3):  # a finished request no longer counts
        assert (await front.http.post(path, json=fields, headers=shown)).status_code == 200
    both = asyncio.create_task(front.openai.completions.create(**ASKED, n=2))
    while len(front.generator.running) < 2:
        await asyncio.sleep(0)
    refused = await front.http.post(path, json=fields, headers=shown)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "capacity")
    both.cancel()
    await asyncio.wait((both,))
    assert (await front.http.post(path, json=fields, headers=shown)).status_code == 200


async def test_keys_do_not_share_cached_prefixes(front: AsgiFront, codec: TextCodec) -> None:
    await front.openai.completions.create(**ASKED)
    await front.openai.completions.create(**ASKED, extra_body={"cache_salt": "mine"})
    plain, salted = [one.cache_salt for one in front.generator.generations]
    assert "" != plain != salted != "mine"
    async with asgi_front(codec) as anybody:
        anybody.plays([Ended(Finish.STOP)])
        await anybody.openai.completions.create(**ASKED, extra_body={"cache_salt": "mine"})
        assert anybody.generator.generations[0].cache_salt == "mine"


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer sk-bob"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer "}],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/nothing", "/"])
async def test_requests_without_a_valid_key_are_refused(front: AsgiFront, headers: Any, path: str) -> None:
    response = await front.http.post(path, json=ASKED, headers=headers)
    assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert front.generator.generations == []


async def test_a_wrong_key_raises_the_clients_authentication_error(front: AsgiFront) -> None:
    with pytest.raises(openai.AuthenticationError):
        await front.openai.with_options(api_key="sk-bob").models.list()
    assert (await front.openai.models.list()).data[0].id == MODEL


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
async def test_probes_need_no_key(front: AsgiFront, path: str) -> None:
    assert (await front.http.get(path)).status_code == 200


async def test_probes_below_a_route_prefix_need_no_key(front: AsgiFront) -> None:
    async with prefixed_client(front.app, "/llm") as prefixed:
        assert (await prefixed.get("/health")).status_code == 200
        assert (await prefixed.get("/v1/models")).status_code == 401


async def test_the_live_page_is_public_and_its_state_is_not(codec: TextCodec) -> None:
    watch = PageWatch(MODEL, _no_samples)
    async with asgi_front(codec, {"keys": KEYS}, key=KEY, further=page_routes(watch)) as front:
        page = await front.http.get("/")
        files = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        assert {name.rpartition(".")[2] for name in files} == {"js", "css", "svg"}
        assert {(await front.http.get(f"/{name}")).status_code for name in files} == {200}
        assert (await front.http.get("/page/state")).status_code == 401
        state = await front.http.get("/page/state", headers={"Authorization": f"Bearer {KEY}"})
        assert (page.status_code, state.status_code) == (200, 200)


async def _no_samples() -> Sequence[Sample]:
    return ()


@pytest.mark.parametrize("path", ["/page/state", "/page/state/x.js", "/page/x.json", "/v1/page/x.js", "/page/.js"])
async def test_paths_resembling_page_files_need_a_key(front: AsgiFront, path: str) -> None:
    assert (await front.http.get(path)).status_code == 401


async def test_without_keys_all_requests_are_served(codec: TextCodec) -> None:
    async with asgi_front(codec) as front:
        front.plays([Ended(Finish.STOP)])
        await front.openai.completions.create(**ASKED)


SITE = "https://chat.example"
PREFLIGHT = {"Origin": SITE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


async def test_only_listed_origins_may_send_requests(codec: TextCodec, front: AsgiFront) -> None:
    response = await front.http.options("/v1/completions", headers=PREFLIGHT)
    assert "access-control-allow-origin" not in response.headers
    async with asgi_front(codec, {"keys": KEYS, "cors_origins": [SITE]}, key=KEY) as open_front:
        response = await open_front.http.options("/v1/completions", headers=PREFLIGHT)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, SITE)
        other = await open_front.http.options("/v1/completions", headers=PREFLIGHT | {"Origin": "https://evil"})
        assert "access-control-allow-origin" not in other.headers
        refused = await open_front.http.get("/v1/models", headers={"Origin": SITE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, SITE)
