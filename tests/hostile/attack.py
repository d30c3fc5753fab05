"""Hostile client as a program: `python -m tests.hostile.attack KIND URL MODEL SECONDS [RATE]`.

RATE is the requests per second of `overload`; `ordinary` measures the server without an attack.

The client runs as a separate process at the lowest priority, so it takes little CPU time from the measured server. It
speaks HTTP over bare sockets, which is cheap and lets it stop at any byte. It prints one JSON line per exchange.
"""

import asyncio
import json
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS = "/v1/completions"
SLOW_READERS = 64
TRICKLING = 500
COMES_AGAIN_S = 10.0
LEAVING = 200
OVERLOAD_TOKENS = 16
PATIENT = 16  # clients that await their answers
PATIENCE_S = 30
AT_ONCE = 4  # concurrent requests with one right answer
LOWEST_PRIORITY = 19


@dataclass(frozen=True)
class Answer:
    """Answer to one request; status 0: the client disconnected first."""

    name: str
    status: int
    is_error: bool = False  # has OpenAI's error format
    retry_after: str | None = None
    param: str | None = None
    ms: float = 0.0  # milliseconds from the request's last byte to the answer's first
    length: int = 0  # bytes


@dataclass(frozen=True)
class Place:
    """The server's address and model."""

    host: str
    port: int
    model: str

    @asynccontextmanager
    async def connection(
        self, receive_buffer: int = 0
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Opens a connection, and closes it immediately on exit."""
        plug = socket.socket()
        plug.setblocking(False)
        if receive_buffer:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(plug, (self.host, self.port))
        reader, writer = await asyncio.open_connection(sock=plug, limit=receive_buffer or 1 << 20)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def asks(self, **fields: Any) -> bytes:
        return self.posts(json.dumps({"model": self.model, "prompt": "Once upon a time", **fields}).encode())

    def posts(self, body: bytes) -> bytes:
        return self.head(len(body)) + body

    def head(self, length: int, path: str = COMPLETIONS, method: str = "POST") -> bytes:
        lines = (f"{method} {path} HTTP/1.1", f"Host: {self.host}", f"Content-Length: {length}")
        return "\r\n".join((*lines, "Content-Type: application/json", "Connection: close", "", "")).encode()

    async def exchange(self, name: str, request: bytes) -> Answer:
        """Sends a request and returns its answer; the server may answer and close early."""
        async with self.connection() as (reader, writer), asyncio.timeout(PATIENCE_S):
            writer.write(request)
            answering = asyncio.ensure_future(_arriving(reader))  # an answer may arrive before the request ends
            with suppress(ConnectionError):
                await writer.drain()
            sent = time.monotonic()
            first_at, answer = await answering
            return _answer(name, answer, 1000 * (first_at - sent))


async def _arriving(reader: asyncio.StreamReader) -> tuple[float, bytes]:
    """Returns the start time of the answer and all bytes until the server closed the connection.

    A server that closes with unread input resets the connection after its answer. The reset would discard an unread
    answer, so this function reads while the client still sends.
    """
    parts = []
    first_at = 0.0
    with suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            first_at = first_at or time.monotonic()
            parts.append(part)
    return first_at, b"".join(parts)


def _answer(name: str, answer: bytes, ms: float = 0.0) -> Answer:
    """Parses an answer or only its head; returns status 0 without one."""
    if not answer:
        return Answer(name, 0)
    head, _, body = answer.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    status = int(status_line.split(maxsplit=2)[1])
    error = _error(body) if status >= 400 else {}
    is_error = all(isinstance(error.get(key), str) for key in ("message", "type")) and "code" in error
    return Answer(
        name, status, is_error, headers.get("retry-after"), error.get("param"), round(ms, 1), length=len(answer)
    )


def _error(body: bytes) -> dict[str, Any]:
    """Parses a JSON body, whole or in one chunk; returns an empty dict for any other body."""
    try:
        return dict(json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["error"])
    except (ValueError, KeyError, TypeError):
        return {}


async def _refusal(name: str, first: bytes, reader: asyncio.StreamReader) -> Answer:
    """Reads the rest of a non-streamed answer."""
    return _answer(name, first + await reader.read())


# ------------------------------------------------------------ bodies


def hostile_bodies(model: str) -> dict[str, bytes]:
    """Returns invalid bodies by name; the server must refuse each."""

    def with_model(rest: str) -> bytes:
        return f'{{"model": "{model}", {rest}}}'.encode()

    def asks(rest: str) -> bytes:
        return with_model(f'"prompt": "a", {rest}')

    megabytes = 1 << 20
    short = '"a",' * (megabytes - 100)
    unknown = ", ".join(f'"x{number}": 1' for number in range(200_000))
    biases = ", ".join(f'"{token}": 1' for token in range(300_000))
    patterns = {f"k{number}": {"type": "string", "pattern": "^[a-z]{1,30}$"} for number in range(1000)}
    schema = json.dumps({"type": "object", "properties": patterns})
    return {
        "negative tokens": with_model(f'"prompt": [[{"-1," * 200_000} -1]]'),
        "many prompts": with_model(f'"prompt": [{short} "a"]'),
        "a long prompt": with_model(f'"prompt": "{"word " * (3 * megabytes // 5)}"'),
        "brackets": b"[" * 3 * megabytes,
        "nested": with_model(f'"prompt": {"[" * 15_000}{"]" * 15_000}'),
        "objects": asks(f'"logit_bias": [{"{}," * megabytes}{{}}]'),
        "unknown fields": asks(unknown),
        "a long number": asks(f'"seed": {"9" * 3 * megabytes}'),
        "a long fraction": asks(f'"temperature": 7.{"1" * 3 * megabytes}'),
        "a huge exponent": asks('"temperature": 1e999999999'),
        "no text": with_model('"prompt": "')[:-1] + b"\xff" * megabytes + b'"}',
        "many stops": asks(f'"stop": [{short} "a"]'),
        "many biases": asks(f'"logit_bias": {{{biases}}}'),
        "many words": asks(f'"bad_words": [{short} "a"]'),
        "a large grammar": asks(f'"structured_outputs": {{"json": {schema}}}'),
        "a bad pattern": asks('"structured_outputs": {"regex": "(a"}'),
        "an empty grammar": asks(f'"structured_outputs": {{"grammar": {json.dumps(chr(10) * 65_000)}}}'),
        "too large": with_model(f'"prompt": "{"a" * 5 * megabytes}"'),
        "unfinished": asks('"n": 1')[:-1],
        "half a character": asks('"stop": "\\ud800"'),
    }


async def bodies(place: Place, seconds: float) -> AsyncIterator[Answer]:
    """Sends the requests in rotation."""
    made = {name: place.posts(body) for name, body in hostile_bodies(place.model).items()}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, request in made.items():
            yield await place.exchange(name, request)
            await asyncio.sleep(0.05)


# ------------------------------------------------------------ requests with one right answer


@dataclass(frozen=True)
class Ask:
    """Request with the required status of its answer."""

    status: int
    method: str
    path: str
    body: bytes = b""

    @property
    def is_clear_error(self) -> bool:
        """True if the answer has a body."""
        return self.method != "HEAD"


FAULTS = {  # chat-template prefixes by the value of the variable FAULT
    "division": "{{ 1 / 0 }}",
    "overflow": "{{ 10.0 ** 400 }}",
    "range": "{{ range(10 ** 9) | list }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{% set nine = messages | length + 8 %}{{ nine ** (nine ** 9) }}",  # Jinja would fold a constant
    "memory": "{{ 'a' * (messages | length * 10 ** 11) }}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
}
FAULT = "fault"


def broken_templates(model: str) -> dict[str, Ask]:
    """Returns conversations that make the template fail, for each chat endpoint."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {**chat, "max_tokens": 4}),
        "stream": ("/v1/chat/completions", {**chat, "max_tokens": 4, "stream": True}),
        "response": ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        "tokens": ("/tokenize", chat),
    }
    return {
        f"{fault} in a {name}": Ask(400, "POST", path, _body(model, **body, chat_template_kwargs={FAULT: fault}))
        for fault in FAULTS
        for name, (path, body) in bodies.items()
    }


def strange_methods(model: str) -> dict[str, Ask]:
    """Returns requests with unsupported methods and schemes."""
    read = ("/health", "/health/live", "/health/ready", "/v1/models", "/metrics", "/docs", "/openapi.json", "/version")
    posted = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize")
    schema = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
    return {
        **{f"HEAD {path}": Ask(200, "HEAD", path) for path in read},
        **{f"HEAD {path}": Ask(405, "HEAD", path) for path in posted},
        **{f"OPTIONS {path}": Ask(405, "OPTIONS", path) for path in (*read, *posted)},
        "HEAD /nothing": Ask(404, "HEAD", "/nothing"),
        "OPTIONS /nothing": Ask(404, "OPTIONS", "/nothing"),
        "oneOf": Ask(400, "POST", COMPLETIONS, _body(model, prompt="a", structured_outputs={"json": schema})),
    }


ASKS: dict[str, Callable[[str], dict[str, Ask]]] = {"templates": broken_templates, "methods": strange_methods}
"""Attacks by name."""


def _body(model: str, **fields: Any) -> bytes:
    return json.dumps({"model": model, **fields}).encode()


async def asks(kind: str, place: Place, seconds: float) -> AsyncIterator[Answer]:
    """Repeats all requests of a kind, AT_ONCE at a time."""
    made = [
        (name, place.head(len(ask.body), ask.path, ask.method) + ask.body)
        for name, ask in ASKS[kind](place.model).items()
    ]
    end = time.monotonic() + seconds

    async def one(first: int) -> list[Answer]:
        answers = []
        for name, request in cycle(made[first:] + made[:first]):
            if time.monotonic() > end:
                return answers
            answers.append(await _guarded(partial(place.exchange, name, request)))
            await asyncio.sleep(0.05)
        return answers

    for answers in await asyncio.gather(*(one(number * len(made) // AT_ONCE) for number in range(AT_ONCE))):
        for answer in answers:
            yield answer


# ------------------------------------------------------------ connections


async def slow_readers(place: Place, seconds: float) -> AsyncIterator[Answer]:
    """Requests long streams and reads a few bytes per second."""

    async def one() -> Answer:
        async with place.connection(receive_buffer=2048) as (reader, writer):
            writer.write(place.asks(stream=True, max_tokens=400, ignore_eos=True, logprobs=20))
            first = await reader.readline()
            if b" 200 " not in first:
                return await _refusal("slow reader", first, reader)
            end = time.monotonic() + seconds
            with suppress(ConnectionError):  # the server may drop a slow reader
                while time.monotonic() < end:
                    await reader.read(16)
                    await asyncio.sleep(1)
            return _answer("slow reader", first)

    async for answer in _all([one for _ in range(SLOW_READERS)]):
        yield answer


async def trickling(place: Place, seconds: float) -> AsyncIterator[Answer]:
    """Sends one byte of each body per second but never the last byte; reconnects when disconnected."""
    end = time.monotonic() + seconds
    rng = random.Random(1)

    async def once() -> Answer:
        async with place.connection() as (reader, writer):
            writer.write(place.head(100_000))
            answering = asyncio.ensure_future(_arriving(reader))
            gives_up = time.monotonic() + PATIENCE_S
            while time.monotonic() < gives_up and not answering.done():
                writer.write(b" ")
                await asyncio.wait((answering,), timeout=1)
            if not answering.done():
                answering.cancel()
                return Answer("never answered", 0)
            _, answer = answering.result()
            return _answer("trickling", answer)

    async def one() -> list[Answer]:
        answers = []
        while time.monotonic() < end:
            answers.append(await _guarded(once))
            await asyncio.sleep(COMES_AGAIN_S * rng.uniform(0.5, 1.5))
        return answers

    for answers in await asyncio.gather(*(one() for _ in range(TRICKLING))):
        for answer in answers:
            yield answer


async def leaving(place: Place, seconds: float) -> AsyncIterator[Answer]:
    """Sends requests, whole or streamed, and disconnects at a random moment."""
    rng = random.Random(1)

    async def one(stream: bool, leaves_at: float, stays_s: float) -> Answer:
        await asyncio.sleep(leaves_at * seconds)
        async with place.connection() as (_, writer):
            writer.write(place.asks(stream=stream, max_tokens=400, n=rng.choice((1, 3))))
            await writer.drain()
            await asyncio.sleep(stays_s)
            return Answer("leaving", 0)

    moments = [(rng.random() < 0.5, rng.random(), rng.choice((0.0, 0.01, 0.3, 2.0))) for _ in range(LEAVING)]
    async for answer in _all([lambda moment=moment: one(*moment) for moment in moments]):
        yield answer


async def ordinary(place: Place, seconds: float) -> AsyncIterator[Answer]:
    """Sends the requests of `overload`; each client awaits an answer before its next request."""
    end = time.monotonic() + seconds

    async def one() -> list[Answer]:
        answers = []
        while time.monotonic() < end:
            answers.append(await place.exchange("ordinary", place.asks(max_tokens=OVERLOAD_TOKENS)))
        return answers

    for answers in await asyncio.gather(*(one() for _ in range(PATIENT))):
        for answer in answers:
            yield answer


async def overload(place: Place, seconds: float, per_second: float) -> AsyncIterator[Answer]:
    """Sends requests at a fixed rate, independent of the answers."""

    async def one(at_s: float) -> Answer:
        await asyncio.sleep(at_s)
        return await place.exchange("overload", place.asks(max_tokens=OVERLOAD_TOKENS))

    moments = [number / per_second for number in range(int(seconds * per_second))]
    async for answer in _all([lambda at_s=at_s: one(at_s) for at_s in moments]):
        yield answer


async def _all(works: list[Callable[[], Awaitable[Answer]]]) -> AsyncIterator[Answer]:
    """Runs all coroutines concurrently and yields their results as they end."""
    for done in asyncio.as_completed([_guarded(work) for work in works]):
        yield await done


async def _guarded(work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Returns a refused or closed connection as an answer."""
    try:
        return await work()
    except (OSError, asyncio.IncompleteReadError, TimeoutError, IndexError) as error:
        return Answer(type(error).__name__, 0)


KINDS: dict[str, Callable[..., AsyncIterator[Answer]]] = {
    "bodies": bodies,
    "slow_readers": slow_readers,
    "trickling": trickling,
    "leaving": leaving,
    "ordinary": ordinary,
    "overload": overload,
    **{kind: partial(asks, kind) for kind in ASKS},
}


async def attack(kind: str, url: str, model: str, seconds: float, *rate: float) -> None:
    parts = urlsplit(url)
    place = Place(parts.hostname or "", parts.port or 80, model)
    async with aclosing(KINDS[kind](place, seconds, *rate)) as answers:
        async for answer in answers:
            print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    os.nice(LOWEST_PRIORITY)
    asyncio.run(attack(*sys.argv[1:4], *map(float, sys.argv[4:])))
