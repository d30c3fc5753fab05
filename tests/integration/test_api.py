"""Tests the HTTP API over a real socket with OpenAI's client and a scripted generator."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import DEFAULT, patch

import httpx
import openai
import pytest
import pytest_asyncio
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import CapacityError, DrainingError, NonFiniteLogitsError, RequestError, TargetLostError
from cluster.routing.ledger import CommittedTokens, Ended
from protos.messages import Acceptance, Finish, Scoring, TokenScore
from serve_app.api.fields import parse
from serve_app.api.metrics import Metrics
from serve_app.api.replies import HealthReport
from serve_app.api.routes import ModelService, create_api
from serve_app.api.text import TextCodec
from tests.asgi_front import byte_codec, config_of
from tests.scripted_generator import STALL, Script, ScriptedGenerator

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the shared server's loop

CONTEXT = 64
MAX_BODY = 4096
BODY_TIMEOUT_S = 0.5
MAX_DRAFT = 5
USER = [{"role": "user", "content": "hi"}]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass
class Front:
    """Running server with its clients."""

    url: str
    generator: ScriptedGenerator
    codec: TextCodec
    metrics: Metrics
    health: dict[str, bool]
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    def plays(self, *scripts: Script) -> None:
        self.generator.scripts = list(scripts)

    def emit(self, text: str, accepted: int = 0, drafted: int = 0) -> CommittedTokens:
        return CommittedTokens(self.codec.encode(text), accepted, drafted)

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"slipstream_{metric}", labels) or 0.0

    async def is_idle(self) -> None:
        """Waits until no request is running; counters change just after an answer."""
        await until(lambda: self.count("running_requests") == 0)

    async def events(self, path: str, **fields: Any) -> list[str]:
        """Returns the data of all events of a stream."""
        async with self.http.stream("POST", path, json=fields | {"model": "toy", "stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        return [line.removeprefix("data: ") for line in lines]


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


class ForwardingApp:
    """Forwards requests to the application of the current test."""

    def __init__(self) -> None:
        self.leads_to: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.leads_to is not None, "no test is under way, and somebody asks"
        await self.leads_to(scope, receive, send)


@dataclass
class SharedServer:
    """Listening socket with its clients, shared by all tests."""

    url: str
    doorway: ForwardingApp
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[SharedServer]:
    doorway = ForwardingApp()
    settings = uvicorn.Config(
        doorway, host="127.0.0.1", port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(settings)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    host, port = server.servers[0].sockets[0].getsockname()
    url = f"http://{host}:{port}"
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        yield SharedServer(url, doorway, client, http)
    server.should_exit = True
    await serving


@pytest_asyncio.fixture(loop_scope="module")
async def front(shared: SharedServer) -> AsyncIterator[Front]:
    """Yields a new application; fails if a session still runs after the test."""
    bounds = {"max_body_bytes": MAX_BODY, "body_timeout_s": BODY_TIMEOUT_S}
    config = config_of(bounds, CONTEXT, speculation={"draft_tokens": MAX_DRAFT})
    codec = byte_codec()
    generator = ScriptedGenerator()
    metrics = Metrics()
    health = {"ready": True}

    async def ready() -> HealthReport:
        return HealthReport(status="ok" if health["ready"] else "unavailable", audit="ok")

    shared.doorway.leads_to = create_api([ModelService(generator, codec, config)], config, metrics, ready)
    front = Front(shared.url, generator, codec, metrics, health, shared.openai, shared.http)
    yield front
    await front.is_idle()
    assert not generator.running


# ------------------------------------------------------------ answers


async def test_a_chat_completion(front: Front) -> None:
    eos = CommittedTokens(front.codec.eos_ids, 0, 2)
    front.plays([front.emit("Hél", 2, 4), front.emit("lo", 2, 2), eos, Ended(Finish.STOP)])
    answer = await front.openai.chat.completions.create(model="toy", messages=USER)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Héllo", "stop")
    (generation,) = front.generator.generations
    assert generation.prompt == front.codec.encode("user:hi;assistant:")
    assert generation.max_len == CONTEXT
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (18, 7, 25)
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 4)


async def test_a_completion(front: Front) -> None:
    front.plays([front.emit("abc"), Ended(Finish.LENGTH)])
    answer = await front.openai.completions.create(model="toy", prompt="hi", max_tokens=3, temperature=0, user="me")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "abc", "length")]
    (generation,) = front.generator.generations
    assert (generation.max_len, generation.sampling.greedy) == (5, True)


async def test_every_prompt_of_a_list_has_choices(front: Front) -> None:
    front.plays([front.emit("a"), Ended(Finish.STOP)], [front.emit("b"), Ended(Finish.STOP)])
    answer = await front.openai.completions.create(model="toy", prompt=[[1, 2], [3]], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    assert [g.prompt for g in front.generator.generations] == [(1, 2), (1, 2), (3,), (3,)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)


async def test_a_chat_stream(front: Front) -> None:
    front.plays(
        [front.emit("He", 1, 3), front.emit("y"), CommittedTokens(front.codec.eos_ids, 0, 0), Ended(Finish.STOP)]
    )
    stream = await front.openai.chat.completions.create(
        model="toy", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    deltas = [(c.delta.role, c.delta.content, c.finish_reason) for chunk in chunks for c in chunk.choices]
    assert deltas == [("assistant", "", None), (None, "He", None), (None, "y", None), (None, None, "stop")]
    *others, last = chunks
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage.completion_tokens == 4
    assert last.usage.completion_tokens_details.rejected_prediction_tokens == 2


async def test_every_chunk_has_the_usage_if_requested(front: Front) -> None:
    front.plays([front.emit("He", 1, 3), front.emit("y"), Ended(Finish.LENGTH)])
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, _ = await front.events(COMPLETIONS, prompt="hi", stream_options=options, repetition_penalty=1.0)
    usages = [json.loads(event)["usage"] for event in events]
    assert {usage["prompt_tokens"] for usage in usages} == {2}
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert all(counts)


def scores_in(front: Front, text: str) -> tuple[TokenScore, ...]:
    """Returns each token's scores: probability 0.5, with itself and "z" as the likeliest tokens."""
    (other,) = front.codec.encode("z")
    return tuple(TokenScore(-0.5, 1, (token, other), (-0.5, -1.0)) for token in front.codec.encode(text))


async def test_an_echoed_completion_with_logprobs(front: Front) -> None:
    emit = CommittedTokens(front.codec.encode("ab"), 0, 0, scores_in(front, "ab"), scores_in(front, "i"))
    front.plays([emit, Ended(Finish.LENGTH)])
    answer = await front.openai.completions.create(model="toy", prompt="hi", echo=True, logprobs=1, max_tokens=2)
    assert front.generator.generations[0].scoring == Scoring(1, 1)
    (choice,) = answer.choices
    assert choice.text == "hiab"
    assert choice.logprobs.tokens == ["h", "i", "a", "b"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert choice.logprobs.top_logprobs == [None, {"i": -0.5}, {"a": -0.5}, {"b": -0.5}]
    *events, _ = await front.events(COMPLETIONS, prompt="hi", echo=True, logprobs=1, max_tokens=2)
    streamed = [json.loads(event)["choices"][0] for event in events]
    assert "".join(part["text"] for part in streamed) == "hiab"
    assert streamed[0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]


async def test_a_completion_stream(front: Front) -> None:
    front.plays([front.emit("He"), front.emit("y"), Ended(Finish.LENGTH)])
    stream = await front.openai.completions.create(model="toy", prompt="hi", stream=True)
    choices = [choice async for chunk in stream for choice in chunk.choices]
    assert [(c.text, c.finish_reason) for c in choices] == [("He", None), ("y", None), ("", "length")]


async def test_events_on_the_wire(front: Front) -> None:
    front.plays([front.emit("a"), Ended(Finish.STOP)])
    *events, done = await front.events(CHAT, messages=USER)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {},
    ]
    expected = {"id", "object", "created", "model", "system_fingerprint", "choices"}
    assert all(chunk.keys() == expected for chunk in chunks)
    of_choice = {"index", "delta", "logprobs", "finish_reason", "stop_reason"}
    assert all(chunk["choices"][0].keys() == of_choice for chunk in chunks)


async def test_a_character_is_never_split_over_chunks(front: Front) -> None:
    first, second = front.codec.encode("é")
    front.plays([CommittedTokens((first,), 0, 0), CommittedTokens((second,), 0, 0), Ended(Finish.STOP)])
    stream = await front.openai.completions.create(model="toy", prompt="hi", stream=True)
    assert [choice.text async for chunk in stream for choice in chunk.choices] == ["é", ""]


async def test_a_traced_stream_marks_drafted_tokens(front: Front) -> None:
    front.plays([front.emit("abc", 2, 4), CommittedTokens(front.codec.eos_ids, 0, 0), Ended(Finish.STOP)])
    *events, _ = await front.events(CHAT, messages=USER, speculation={"trace": True})
    assert [json.loads(event)["slipstream"] for event in events] == [
        {"tokens": 0, "accepted": 0, "pieces": []},
        {"tokens": 3, "accepted": 2, "pieces": [["a", True], ["b", True], ["c", False]]},
        {"tokens": 1, "accepted": 0, "pieces": []},
    ]


async def test_two_choices_stream_side_by_side(front: Front) -> None:
    a = front.emit("a")
    b = front.emit("b")
    end = Ended(Finish.STOP)
    front.plays([a, a, end], [b, end])
    stream = await front.openai.chat.completions.create(model="toy", messages=USER, n=2, seed=3, stream=True)
    texts = {0: "", 1: ""}
    ends = []
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == {0: "aa", 1: "b"}
    assert sorted(ends) == [0, 1]
    assert [(g.choice, g.seed, g.acceptance) for g in front.generator.generations] == [
        (0, 3, Acceptance.COUPLED),
        (1, 3, Acceptance.COUPLED),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_and_cancels_the_session(front: Front, stream: bool) -> None:
    front.plays([front.emit("one E", 2, 2), front.emit("ND two", 5, 5), STALL])
    fields = {"model": "toy", "prompt": "hi", "stop": ["END", "never"]}
    if stream:
        chunks = await front.openai.completions.create(**fields, stream=True)
        choices = [choice async for chunk in chunks for choice in chunk.choices]
        text = "".join(choice.text for choice in choices)
        reason = choices[-1].finish_reason
    else:
        answer = await front.openai.completions.create(**fields)
        text = answer.choices[0].text
        reason = answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == 7  # tokens after the stop string do not count
    assert (text, reason) == ("one ", "stop")
    await asyncio.wait_for(front.generator.left.wait(), 5)


async def test_models_health_and_metrics(front: Front) -> None:
    models = await front.openai.models.list()
    assert [model.id for model in models.data] == ["toy"]
    assert (await front.http.get("/health")).json() == {"status": "ok", "models": {}, "audit": "ok"}
    front.health["ready"] = False
    assert (await front.http.get("/health")).status_code == 503
    front.plays([front.emit("abc", 2, 4), Ended(Finish.STOP)])
    await front.openai.completions.create(model="toy", prompt="hi")
    await front.is_idle()
    text = (await front.http.get("/metrics")).text
    assert 'slipstream_requests_total{endpoint="completions",status="200"} 1.0' in text
    assert "slipstream_prompt_tokens_total 2.0" in text
    assert "slipstream_draft_tokens_total 4.0" in text


# ------------------------------------------------------------ refusals


async def refused(front: Front, path: str, content: Any, status: int, param: str | None) -> dict[str, Any]:
    """Posts an invalid body; returns the error, in OpenAI's format."""
    response = await front.http.post(path, content=content)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert front.generator.generations == []
    return dict(error)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"unknown": 1}, "unknown"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"max_tokens": CONTEXT}, "max_tokens"),
        (COMPLETIONS, {"prompt": ""}, "prompt[0]"),
        (COMPLETIONS, {"prompt": "x" * CONTEXT}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 259]}, "prompt"),
        (COMPLETIONS, {"speculation": {"draft_tokens": MAX_DRAFT + 1}}, "speculation.draft_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
        (CHAT, {"messages": USER, "max_completion_tokens": CONTEXT}, "max_completion_tokens"),
        (CHAT, {"messages": USER, "tools": [{}]}, "tools[0].type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_invalid_input_is_refused_with_the_field(
    front: Front, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    base = {"model": "toy", "stream": stream} | ({"prompt": "hi"} if path == COMPLETIONS else {})
    error = await refused(front, path, json.dumps(base | fields), 400, param)
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]


async def test_an_unknown_model_is_not_found(front: Front) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await front.openai.chat.completions.create(model="other", messages=USER)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_requests_are_parsed_and_tokenized_off_the_event_loop(front: Front) -> None:
    threads = set()

    def encode(text: str) -> tuple[int, ...]:
        threads.add(threading.get_ident())
        return (1, 2)

    front.plays([Ended(Finish.STOP)])
    with patch.object(front.codec, "encode", encode), patch("serve_app.api.formats.parse", wraps=parse) as parsing:
        parsing.side_effect = lambda *_: threads.add(threading.get_ident()) or DEFAULT
        await front.openai.completions.create(model="toy", prompt="hi")
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", CHAT, 405)])
async def test_unknown_routes_answer_in_the_same_format(front: Front, method: str, path: str, status: int) -> None:
    response = await front.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


# ------------------------------------------------------------ failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "error", "status"),
    [
        (CapacityError("full"), openai.RateLimitError, 429),
        (TargetLostError("lost"), openai.InternalServerError, 503),
        (DrainingError("stopping"), openai.InternalServerError, 503),
        (NonFiniteLogitsError("NaN"), openai.InternalServerError, 500),
        (RequestError("bad", "prompt"), openai.BadRequestError, 400),
        (ValueError("secret"), openai.InternalServerError, 500),
    ],
)
async def test_a_failure_before_the_first_token_has_its_status(
    front: Front, stream: bool, failure: Exception, error: type[openai.APIStatusError], status: int
) -> None:
    front.plays([failure])
    with pytest.raises(error) as caught:
        await front.openai.completions.create(model="toy", prompt="hi", stream=stream)
    assert caught.value.status_code == status
    assert ("retry-after" in caught.value.response.headers) == isinstance(failure, CapacityError | DrainingError)
    assert "secret" not in caught.value.message
    await front.is_idle()
    assert front.count("requests_total", endpoint="completions", status=str(status)) == 1


@pytest.mark.parametrize("failure", [CapacityError("full"), DrainingError("stopping")])
async def test_without_room_no_body_is_read(front: Front, failure: Exception) -> None:
    front.generator.refusal = failure
    front.generator.room = 0
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{".encode())
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert answer.split()[1] == (b"429" if isinstance(failure, CapacityError) else b"503")
    assert b"retry-after: 1" in answer.lower()
    writer.close()


async def test_too_many_sessions_are_refused_before_tokenization(front: Front) -> None:
    front.generator.refusal = CapacityError("full")
    front.generator.room = 5
    with patch.object(front.codec, "encode") as encode, pytest.raises(openai.RateLimitError):
        await front.openai.completions.create(model="toy", prompt=["a", "b"], n=3)
    encode.assert_not_called()
    assert front.generator.checked == [1, 6]
    assert front.generator.generations == []


async def test_a_failure_within_a_stream_is_its_last_event(front: Front) -> None:
    front.plays([front.emit("a"), TargetLostError("lost")], [front.emit("b"), STALL])
    stream = await front.openai.chat.completions.create(model="toy", messages=USER, n=2, stream=True)
    with pytest.raises(openai.APIError, match="lost"):
        async for _ in stream:
            pass
    await asyncio.wait_for(front.generator.left.wait(), 5)
    *_, last, done = await front.events(CHAT, messages=USER)
    assert json.loads(last)["error"]["code"] == "target_lost"
    assert done == "[DONE]"
    await front.is_idle()
    assert front.count("requests_total", endpoint="chat", status="503") == 2


async def test_nonfinite_logits_are_an_error_without_retry(front: Front) -> None:
    front.plays([NonFiniteLogitsError("NaN")])
    whole = await front.http.post(COMPLETIONS, json={"model": "toy", "prompt": "hi"})
    assert whole.status_code == 500
    assert whole.headers["x-should-retry"] == "false"
    error = {"message": "NaN", "type": "server_error", "param": None, "code": "non_finite_logits"}
    assert whole.json() == {"error": error}
    front.plays([front.emit("a"), NonFiniteLogitsError("NaN")])
    events = await front.events(COMPLETIONS, prompt="hi")
    assert [json.loads(event) for event in events if "error" in event] == [{"error": error}]


async def test_an_unexpected_failure_is_logged_once(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    front.plays([ValueError("secret")])
    with pytest.raises(openai.InternalServerError):
        await front.openai.completions.create(model="toy", prompt="hi")
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]


# ------------------------------------------------------------ disconnects


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_before_the_first_token_cancels(front: Front, stream: bool) -> None:
    front.plays([STALL])
    fields = {"model": "toy", "prompt": "hi", "n": 3, "stream": stream}
    asking = asyncio.create_task(front.http.post(COMPLETIONS, json=fields))
    await until(lambda: len(front.generator.running) == 3)
    asking.cancel()
    await asyncio.wait_for(front.generator.left.wait(), 5)
    assert len(front.generator.generations) == 3


async def test_a_disconnect_within_a_stream_cancels(front: Front) -> None:
    front.plays([front.emit("a"), STALL])
    stream = await front.openai.chat.completions.create(model="toy", messages=USER, n=2, stream=True)
    await anext(aiter(stream))
    assert len(front.generator.running) == 2
    await stream.close()
    await asyncio.wait_for(front.generator.left.wait(), 5)
    await front.is_idle()
    assert front.count("requests_total", endpoint="chat", status="499") == 1


async def test_a_disconnect_does_not_affect_others(front: Front) -> None:
    front.plays([front.emit("a"), STALL])
    leaving = await front.openai.completions.create(model="toy", prompt="hi", stream=True)
    await anext(aiter(leaving))
    front.plays([front.emit("ok"), Ended(Finish.STOP)])
    staying = front.openai.completions.create(model="toy", prompt="hi")
    await leaving.close()
    assert (await staying).choices[0].text == "ok"
