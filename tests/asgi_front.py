"""The HTTP application without a socket: OpenAI's client in front of it, a scripted generator behind it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from fastapi import FastAPI
from starlette.routing import Route

from cluster.config import SlipstreamConfig, validated
from cluster.routing.ledger import CommittedTokens
from serve_app.api.app import create_api
from serve_app.api.metrics import Metrics
from serve_app.api.replies import HealthReport
from serve_app.api.text import TextCodec
from serve_app.api.validation import NO_DEFAULTS, GenerationDefaults
from tests.integration.scripted_generator import Script, ScriptedGenerator

MODEL = "toy"


@dataclass
class AsgiFront:
    """An application and its clients."""

    app: FastAPI
    generator: ScriptedGenerator
    codec: TextCodec
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    def plays(self, *scripts: Script) -> None:
        self.generator.scripts = list(scripts)

    def emits(self, text: str, size: int = 1) -> list[CommittedTokens]:
        """The text as a model commits it, so many tokens at once."""
        tokens = self.codec.encode(text)
        return [CommittedTokens(tokens[start : start + size], 0, 0) for start in range(0, len(tokens), size)]

    @property
    def prompt(self) -> tuple[int, ...]:
        """Returns the prompt of the only request so far."""
        (generation,) = self.generator.generations
        return generation.prompt


def config_of(server: Mapping[str, Any]) -> SlipstreamConfig:
    """A configuration with this for its section `server`."""
    return validated(
        {
            "model": {"target": "models/toy", "max_context": 4096},
            "draft": {"method": "ngram"},
            "server": dict(server),
        }
    )


@asynccontextmanager
async def asgi_front(
    codec: TextCodec,
    server: Mapping[str, Any] | None = None,
    *,
    key: str = "none",
    defaults: GenerationDefaults = NO_DEFAULTS,
    further: Sequence[Route] = (),
) -> AsyncIterator[AsgiFront]:
    """An application of its own, which leaves nothing running."""
    config = config_of(server or {})
    generator = ScriptedGenerator()

    async def health() -> HealthReport:
        return HealthReport(status="ok", audit="off")

    app = create_api(generator, codec, config, Metrics(), health, defaults, further=further)
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
        httpx.AsyncClient(transport=transport) as behind,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, max_retries=0, http_client=behind) as client,
    ):
        yield AsgiFront(app, generator, codec, client, http)
    assert not generator.running
