"""API and live page over a real socket, with a scripted generator and scripted samples."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.routing.ledger import CommittedTokens
from cluster.speculation.estimators import AcceptanceCounts
from cluster.telemetry import Actor, Timeline, pack
from serve_app.api.text import TextCodec
from serve_app.page.routes import DraftSample, PageWatch, Sample, TargetSample, page_routes
from tests.asgi_front import byte_codec, toy_api
from tests.scripted_generator import Script, ScriptedGenerator


@dataclass
class KeyCheck:
    """Access check that requires a key, if one is set, for everything except the page itself."""

    leads_to: ASGIApp
    key: str | None = None
    shown: list[str] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").decode()
        is_open = scope["path"] == "/" or scope["path"].endswith((".css", ".js", ".svg"))
        if self.key is None or is_open or given == f"Bearer {self.key}":
            await self.leads_to(scope, receive, send)
            return
        self.shown.append(given)
        error = {"message": "this server asks for an API key", "type": "invalid_request_error"}
        await JSONResponse({"error": error}, 401)(scope, receive, send)


@dataclass
class Front:
    """Running server with scripted parts."""

    url: str
    generator: ScriptedGenerator
    codec: TextCodec
    doorkeeper: KeyCheck

    def plays(self, *scripts: Script) -> None:
        self.generator.scripts = list(scripts)

    def emit(self, text: str, accepted: int = 0, rejected: str = "") -> CommittedTokens:
        tokens = self.codec.encode(rejected)
        return CommittedTokens(self.codec.encode(text), accepted, accepted + len(tokens), rejected=tokens)


@contextmanager
def scripted_front() -> Iterator[Front]:
    """Runs a server in its own thread on a free port."""
    codec = byte_codec()
    generator = ScriptedGenerator()
    api = toy_api(generator, codec, further=page_routes(PageWatch("toy", samples)))
    doorkeeper = KeyCheck(api)
    server = uvicorn.Server(uvicorn.Config(doorkeeper, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Front(f"http://127.0.0.1:{port}", generator, codec, doorkeeper)
    server.should_exit = True
    thread.join()


async def samples() -> Sequence[Sample]:
    """Returns samples of a half-busy target at 80 tokens per second, and of its drafter."""
    now = time.monotonic()
    acceptance = AcceptanceCounts((100, 80, 40), (80, 40, 10))
    target = TargetSample(
        name="target 1",
        at_s=now,
        sessions=3,
        queued=1,
        step_s=now / 2,
        committed_tokens=int(80 * now),
        accepted_tokens=int(3000 * now),
        wasted_tokens=int(1000 * now),
        acceptance=acceptance,
        is_drafted_for=True,
        gain=1.5,
        cache=0.25,
        recording=_recording("target", "target 1", now, ("verify", "decided")),
    )
    drafter = DraftSample(
        name="drafter 1",
        at_s=now,
        method="draft_model",
        sessions=3,
        draft_tokens=int(40 * now),
        passes=30,
        passes_ahead=10,
        recording=_recording("drafter", "drafter 1", now, ("draft", "drafted")),
    )
    return [drafter, target]


def _recording(role: str, name: str, now: float, events: tuple[str, str]) -> bytes:
    """Returns twenty 50 ms spans, one every 100 ms."""
    at = [now - 2.0]
    timeline = Timeline(lambda: at[0])
    for _ in range(20):
        for event in events:
            timeline.record(event, "session")
            at[0] += 0.05
    return pack(Actor(role, name, timeline.recording(lambda: at[0])))
