"""After SIGTERM, requests that outlast `server.drain_s` end with OpenAI-format errors, and every path returns one."""

import json
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from tests.integration.serving import Served, demo_served

DRAIN_S = 1.0
SETTLES_S = 1.0  # time for routers to end their requests
PATHS = ("/v1/models", "/health", "/health/ready", "/docs", "/nothing")
ASKS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "temperature": 1.0}


def streamed(served: Served, path: str, body: dict[str, Any], began: threading.Event) -> list[str]:
    """Returns the data of a stream's events."""
    data = []
    asked = {"model": served.config.model.name, "stream": True, **body}
    with httpx.stream("POST", f"{served.url}{path}", json=asked, timeout=120, trust_env=False) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                data.append(line.removeprefix("data: "))
                began.set()
    return data


def whole(served: Served) -> httpx.Response:
    body = {"model": served.config.model.name, "prompt": "Once upon a time", **ASKS}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=120, trust_env=False)


def ask_until_unreachable(url: str) -> list[tuple[float, str, httpx.Response]]:
    """Requests each path until the server is gone; returns the times and answers."""
    found = []
    with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        while True:
            for path in PATHS:
                at = time.monotonic()
                try:
                    found.append((at, path, client.get(path)))
                except httpx.TransportError:
                    return found
            time.sleep(0.02)


def served_until_stopped(threads: ThreadPoolExecutor) -> tuple[list[Future[Any]], float]:
    """Returns the results of two streams, a whole answer and a polling client, with the time of SIGTERM."""
    chat = {"messages": [{"role": "user", "content": "Tell me a long story."}], **ASKS}
    response = {"input": "Tell me a long story.", "max_output_tokens": 900, "ignore_eos": True}
    futures: list[Future[Any]] = []
    signalled = 0.0
    try:
        with demo_served(f"server.drain_s={DRAIN_S}") as served:
            began = [threading.Event(), threading.Event()]
            futures += [
                threads.submit(streamed, served, "/v1/chat/completions", chat, began[0]),
                threads.submit(streamed, served, "/v1/responses", response, began[1]),
                threads.submit(whole, served),
            ]
            assert all(one.wait(60) for one in began)
            futures.append(threads.submit(ask_until_unreachable, served.url))
            signalled = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(120)  # interrupted
    except KeyboardInterrupt:
        return futures, signalled
    raise AssertionError("SIGTERM ended nothing")


def test_every_request_cut_short_by_a_stop_gets_an_error() -> None:
    with ThreadPoolExecutor(4) as threads:
        (chatting, responding, waiting, asking), signalled = served_until_stopped(threads)
    *_, last, done = chatting.result()
    assert (json.loads(last)["error"]["code"], done) == ("draining", "[DONE]")
    failed = json.loads(responding.result()[-1])
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "server_error"
    answer = waiting.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in answer.headers
    after = [(path, one) for at, path, one in asking.result() if at > signalled + DRAIN_S + SETTLES_S]
    assert {path for path, _ in after} == set(PATHS), "the proxy was gone before it could be asked"
    for path, one in after:
        assert one.status_code == 503, f"{path}: {one.text}"
        assert one.json()["error"]["type"] == "server_error"
        assert "retry-after" in one.headers
