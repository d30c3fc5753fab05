"""Endless HTTP streams that record each answer, the arrival times of its chunks, and the serving replicas."""

import asyncio
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.reporting_router import ROUTER

TIMEOUT_S = 600.0  # long, so that stalls show in the times instead of failing


@dataclass(frozen=True)
class Request:
    """A prompt and its sampling parameters."""

    prompt: str
    sampling: Mapping[str, object]


@dataclass
class Answer:
    """Answer to one request, with monotonic times."""

    request: int  # index among the requests
    began_s: float
    came_s: list[float] = field(default_factory=list)  # arrival times of its chunks
    ended_s: float = 0.0
    text: str = ""
    finish: str | None = None
    router: int | None = None  # pid, once it has begun to answer
    error: str | None = None  # reason of a failure


class Load:
    """Repeats each request in its own stream until stopped."""

    def __init__(self, url: str, model: str, tokens: int, requests: Sequence[Request]) -> None:
        self.answers: list[Answer] = []
        self._url = url
        self._model = model
        self._tokens = tokens
        self._requests = requests
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stops once running requests have finished; callable from any thread."""
        self._stopping.set()

    async def run(self, rounds: int | None = None) -> None:
        """Runs until stopped, or until every request has `rounds` answers."""
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, trust_env=False) as http:
            await asyncio.gather(*(self._repeat(http, index, rounds) for index in range(len(self._requests))))

    async def _repeat(self, http: httpx.AsyncClient, index: int, rounds: int | None) -> None:
        made = 0
        while not self._stopping.is_set() and made != rounds:
            answer = Answer(index, time.monotonic())
            self.answers.append(answer)
            try:
                await self._stream(http, answer)
            except httpx.HTTPError as error:
                answer.error = repr(error)
            answer.ended_s = time.monotonic()
            made += 1
            if answer.error is not None:
                await asyncio.sleep(0.5)

    async def _stream(self, http: httpx.AsyncClient, answer: Answer) -> None:
        request = self._requests[answer.request]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": self._tokens,
            "stream": True,
            **request.sampling,
        }
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            answer.router = int(response.headers[ROUTER]) if ROUTER in response.headers else None
            if response.is_error:
                await response.aread()
                answer.error = f"{response.status_code}: {response.text}"
                return
            is_done = False
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    is_done = _take(answer, line.removeprefix("data: "))
            if not is_done and answer.error is None:
                answer.error = "the stream ended without [DONE]"


def _take(answer: Answer, data: str) -> bool:
    """Records an event; returns whether it is the last."""
    if data == "[DONE]":
        return True
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        answer.error = json.dumps(event["error"])
        return False
    answer.came_s.append(time.monotonic())
    for choice in event["choices"]:
        answer.text += choice["delta"].get("content") or ""
        answer.finish = choice["finish_reason"] or answer.finish
    return False
