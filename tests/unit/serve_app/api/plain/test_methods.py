"""Tests unsupported HTTP methods, and health probes."""

import pytest

from cluster.errors import DrainingError
from serve_app.api.failures import RefuseWhenStopped
from serve_app.api.metrics import Metrics
from serve_app.api.replies import HealthReport
from serve_app.api.routes import ModelService, create_api
from serve_app.api.text import TextCodec
from tests.asgi_front import MODEL, asgi_front, config_of, http_client, stream_data
from tests.scripted_generator import ScriptedGenerator

READ = ("/health", "/health/live", "/health/ready", "/v1/models", f"/v1/models/{MODEL}", "/version", "/metrics")
PAGES = ("/docs", "/openapi.json")
POSTED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
ALIKE = ("content-type", "content-length")


async def test_head_is_answered_like_get(codec: TextCodec) -> None:
    async with asgi_front(codec) as front:
        for path in (*READ, *PAGES, "/v1/models/unknown", "/nothing"):
            head, get = [await front.http.request(method, path) for method in ("HEAD", "GET")]
            assert (head.status_code, head.content) == (get.status_code, b"")
            if path != "/metrics":  # its values change
                assert [head.headers.get(name) for name in ALIKE] == [get.headers.get(name) for name in ALIKE]


async def test_other_methods_are_refused_with_the_allowed_ones(codec: TextCodec) -> None:
    async with asgi_front(codec) as front:
        for method in ("OPTIONS", "DELETE"):
            for path in (*READ, *PAGES, *POSTED):
                answer = await front.http.request(method, path)
                allowed = {"POST"} if path in POSTED else {"GET", "HEAD"}
                assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, allowed)
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "method_not_allowed")
                assert answer.headers["allow"] in error["message"]
            assert (await front.http.request(method, "/nothing")).json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("asks", [{"Origin": "https://evil.example"}, {"Access-Control-Request-Method": "DELETE"}])
async def test_a_refused_preflight_has_openais_form(codec: TextCodec, asks: dict[str, str]) -> None:
    site = "https://chat.example"
    async with asgi_front(codec, {"cors_origins": [site]}) as front:
        headers = {"Origin": site, "Access-Control-Request-Method": "POST"} | asks
        answer = await front.http.options("/v1/completions", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "cross_origin")
        assert "Disallowed CORS" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("status", "ready"), [("ok", 200), ("unavailable", 503)])
async def test_a_router_that_is_not_ready_is_alive(codec: TextCodec, status: str, ready: int) -> None:
    async def health() -> HealthReport:
        return HealthReport.model_validate({"status": status, "audit": "off"})

    config = config_of({"keys": {"a": {"sha256": "0" * 64}}})
    app = create_api([ModelService(ScriptedGenerator(), codec, config)], config, Metrics(), health)
    async with http_client(app) as http:
        assert (await http.get("/health/live")).json() == {"status": "ok"}
        answer = await http.get("/health/ready")
        assert (answer.status_code, answer.json()) == (ready, {"status": status})
        assert (await http.get("/health")).json() == {"status": status, "models": {}, "audit": "off"}


async def test_a_stopped_router_is_alive_and_answers_all_other_paths_with_503(codec: TextCodec) -> None:
    has_stopped = [False]
    async with asgi_front(codec) as front:
        front.app.add_middleware(RefuseWhenStopped, has_stopped=lambda: has_stopped[0])
        assert (await front.http.get("/v1/models")).status_code == 200
        has_stopped[0] = True
        for path in {*READ, *PAGES, *POSTED, "/nothing"} - {"/health/live"}:
            answer = await front.http.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "draining"
        assert (await front.http.get("/health/live")).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_an_answer_cut_short_by_a_stop_ends_in_openais_form(codec: TextCodec, path: str, body: object) -> None:
    assert isinstance(body, dict)
    async with asgi_front(codec) as front:
        front.plays([*front.emits("ab"), DrainingError("stopped")])
        whole = await front.http.post(path, json={"model": MODEL, **body})
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "draining")
        assert whole.headers["retry-after"] == "1"
        stream = await front.http.post(path, json={"model": MODEL, "stream": True, **body})
        data = stream_data(stream.text)
        assert stream.status_code == 200
        if path == "/v1/responses":
            assert '"type": "response.failed"' in data[-1]
        else:
            assert '"code":"draining"' in data[-2]
            assert data[-1] == "[DONE]"
