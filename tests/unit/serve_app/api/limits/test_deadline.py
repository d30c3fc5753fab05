"""Requests past their deadline end with an error and without running sessions."""

import asyncio

import pytest

from serve_app.api.limits import Deadline, RequestTimeoutError
from serve_app.api.text import TextCodec
from tests.asgi_front import MODEL, asgi_front, stream_data, stream_events
from tests.scripted_generator import STALL

SOON_S = 0.001
BOUNDED = {"request_timeout_s": SOON_S}
ASKS = {"model": MODEL, "prompt": "hi", "max_tokens": 9}


async def test_a_request_past_its_deadline_gets_408_without_retry(codec: TextCodec) -> None:
    async with asgi_front(codec, BOUNDED) as front:
        front.plays([*front.emits("a"), STALL])
        answer = await front.http.post("/v1/completions", json=ASKS)
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "request_timeout"
        assert "within 0.001 s" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert not front.generator.running


async def test_a_stream_past_its_deadline_ends_with_an_error_event(codec: TextCodec) -> None:
    async with asgi_front(codec, {"request_timeout_s": 0.5}) as front:
        front.plays([*front.emits("ab"), STALL])
        answer = await front.http.post("/v1/completions", json={**ASKS, "stream": True})
        assert answer.status_code == 200
        assert stream_events(answer.text)[-1]["error"]["code"] == "request_timeout"
        assert stream_data(answer.text)[-1] == "[DONE]"
        assert not front.generator.running


async def test_no_deadline_without_a_limit() -> None:
    deadline = Deadline.within(None)
    assert deadline.at is None
    is_over = False
    async with deadline.enforced():
        await asyncio.sleep(0)
        is_over = True
    assert is_over


async def test_another_timeout_is_not_reported_as_the_requests() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline.within(1e6).enforced(), asyncio.timeout(0):
            await asyncio.Event().wait()


async def test_work_past_the_deadline_is_cancelled() -> None:
    with pytest.raises(RequestTimeoutError):
        async with Deadline.within(0).enforced():
            await asyncio.Event().wait()
