"""Tests the client against a scripted server without sockets."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import pytest

from cluster.routing.ledger import CommittedTokens
from serve_app.api.metrics import Metrics
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Counters, EndpointError, Piece, Tally

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 4},
}


def chunk(text: str | None, **extra: Any) -> str:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return f"data: {json.dumps({'choices': choices, **extra})}\n\n"


def endpoint(
    answer: Callable[[httpx.Request], httpx.Response], headers: Mapping[str, str] | None = None
) -> ChatEndpoint:
    transport = httpx.MockTransport(answer)
    return ChatEndpoint(httpx.AsyncClient(base_url="http://scripted", transport=transport, headers=headers))


def streaming(*events: str) -> ChatEndpoint:
    return endpoint(lambda _: httpx.Response(200, text="".join(events)))


async def test_an_answer_is_assembled_from_the_stream() -> None:
    pieces_shown: list[Piece] = []

    def show(pieces: Sequence[Piece]) -> None:
        pieces_shown.extend(pieces)

    server = streaming(
        chunk("a", slipstream={"tokens": 1, "accepted": 0, "pieces": [["a", False]]}),
        chunk("bc", slipstream={"tokens": 2, "accepted": 1, "pieces": [["b", True], ["c", False]]}),
        chunk(None, usage=USAGE),
        "data: [DONE]\n\n",
    )
    answer = await server.ask("m", ChatQuestion("hi", 3), show)
    assert (answer.text, answer.tokens, answer.accepted, answer.rejected) == ("abc", 3, 1, 4)
    assert 0 < answer.first_token_s <= answer.latency_s
    assert pieces_shown == [("a", False), ("b", True), ("c", False)]


async def test_a_question_becomes_the_request() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, text=chunk("x", usage=USAGE))

    server = endpoint(answer)
    await server.ask("m", ChatQuestion("hi", 7, ignore_eos=True, draft_tokens=0))
    await server.ask("m", ChatQuestion("hi", 7), lambda _: None)
    await server.ask("m", ChatQuestion("hi", 7, temperature=0.7, acceptance="rejection"))
    plain, speculative, sampled = seen
    assert plain["speculation"] == {"trace": False, "draft_tokens": 0}
    assert speculative["speculation"] == {"trace": True}  # keeps the server's settings
    assert (plain["temperature"], plain["max_tokens"], plain["ignore_eos"]) == (0, 7, True)
    assert (sampled["temperature"], sampled["speculation"]) == (0.7, {"trace": False, "acceptance": "rejection"})


async def test_a_refusal_contains_the_servers_message() -> None:
    server = endpoint(lambda _: httpx.Response(400, json={"error": {"message": "max_tokens is 9, expected at most 8"}}))
    with pytest.raises(EndpointError, match="400: max_tokens is 9, expected at most 8"):
        await server.ask("m", ChatQuestion("hi", 9))


async def test_a_refusal_names_the_field() -> None:
    error = {"message": "max_tokens is 9, expected at most 8", "param": "max_tokens"}
    server = endpoint(lambda _: httpx.Response(400, json={"error": error}))
    with pytest.raises(EndpointError) as caught:
        await server.ask("m", ChatQuestion("hi", 9))
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "requires an API key; set --api-key or SLIPSTREAM_API_KEY"),
        ({"Authorization": "Bearer k"}, "does not accept this API key; correct --api-key or SLIPSTREAM_API_KEY"),
    ],
)
async def test_a_missing_or_wrong_key_is_refused_with_the_option(headers: dict[str, str], expected: str) -> None:
    server = endpoint(lambda _: httpx.Response(401, json={"error": {"message": "send the header"}}), headers)
    with pytest.raises(EndpointError) as caught:
        await server.model()
    assert str(caught.value) == f"http://scripted/v1/models {expected}"


async def test_a_failure_within_a_stream_is_raised() -> None:
    server = streaming(chunk("a"), f"data: {json.dumps({'error': {'message': 'the target is lost'}})}\n\n")
    with pytest.raises(EndpointError, match="broke off: the target is lost"):
        await server.ask("m", ChatQuestion("hi", 9))


async def test_a_truncated_stream_is_an_error() -> None:
    with pytest.raises(EndpointError, match="without its usage"):
        await streaming(chunk("a")).ask("m", ChatQuestion("hi", 9))


def test_counters_are_read_from_the_routers_metrics() -> None:
    metrics = Metrics()
    metrics.committed(CommittedTokens((1, 2, 3), accepted=2, drafted=5), 0.1, first=True)
    metrics.committed(CommittedTokens((4,), accepted=0, drafted=0), 0.1, first=False)
    with metrics.request("chat"):
        counters = Counters.parse(metrics.exposition().decode())
    assert counters == Counters(1, Tally(tokens=4, drafted=5, accepted=2, verifies=2, blocks=1))


def test_metrics_of_another_server_are_refused() -> None:
    with pytest.raises(EndpointError, match="slipstream_running_requests"):
        Counters.parse("# TYPE other_total counter\nother_total 1\n")
