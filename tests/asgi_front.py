"""In-process HTTP application for tests, without a socket, over a scripted or real generator."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.config import SlipstreamConfig, validated
from cluster.routing.ledger import CommittedTokens
from serve_app.api.access import ADMIN_PORT
from serve_app.api.draft_prompt import DraftPrompts
from serve_app.api.generation import Generator
from serve_app.api.metrics import Metrics
from serve_app.api.replies import HealthReport
from serve_app.api.routes import ModelService, create_api
from serve_app.api.text import TextCodec
from serve_app.api.tool_calls import find_template
from serve_app.api.validation import NO_DEFAULTS, GenerationDefaults
from tests.byte_tokenizer import byte_tokenizer
from tests.scripted_generator import Script, ScriptedGenerator
from tests.talking_tokenizer import MODEL_TYPE, talking_tokenizer

MODEL = "toy"


def config_of(server: Mapping[str, Any], context: int = 4096, **sections: Any) -> SlipstreamConfig:
    """Returns a configuration with the given `server` section."""
    model = {"target": f"models/{MODEL}", "max_context": context}
    return validated({"model": model, "draft": {"method": "ngram"}, "server": dict(server)} | sections)


def codec_of(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer, (tokenizer.eos_token_id,))


def byte_codec() -> TextCodec:
    return codec_of(byte_tokenizer())


def talking_codec(**options: Any) -> TextCodec:
    """Returns a codec for a model with reasoning and tool calls."""
    tokenizer = talking_tokenizer()
    return TextCodec(tokenizer, (tokenizer.eos_token_id,), find_template("auto", tokenizer, MODEL_TYPE), **options)


async def healthy() -> HealthReport:
    return HealthReport(status="ok", audit="off")


def toy_api(
    generator: Generator,
    codec: TextCodec,
    config: SlipstreamConfig | None = None,
    metrics: Metrics | None = None,
    **options: Any,
) -> FastAPI:
    """Returns an application with a healthy router; `options` are passed to `ModelService` or `create_api`."""
    config = config or config_of({})
    of_model = {name: options.pop(name) for name in ("defaults", "checkpoint", "draft_prompts") if name in options}
    models = [ModelService(generator, codec, config, **of_model)]
    return create_api(models, config, metrics or Metrics(), healthy, **options)


def http_client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60)


def operators_client(app: ASGIApp) -> httpx.AsyncClient:
    """Returns a client of the admin port."""

    async def at_admin_port(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, ADMIN_PORT: True}, receive, send)

    return http_client(at_admin_port)


def prefixed_client(app: ASGIApp, prefix: str) -> httpx.AsyncClient:
    """Returns a client of Serve's proxy with a `route_prefix`, which stays in the path."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=prefix), base_url=f"http://test{prefix}")


@asynccontextmanager
async def openai_client(app: ASGIApp, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        http_client(app) as behind,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, max_retries=0, http_client=behind) as client,
    ):
        yield client


def stream_data(text: str) -> list[str]:
    """Returns the data of a stream's events."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def stream_events(text: str) -> list[Any]:
    """Returns a stream's parsed events, without the final marker."""
    return [json.loads(data) for data in stream_data(text) if data != "[DONE]"]


@dataclass
class AsgiFront:
    """Application over a scripted generator, with its clients."""

    app: FastAPI
    generator: ScriptedGenerator
    codec: TextCodec
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    def plays(self, *scripts: Script) -> None:
        self.generator.scripts = list(scripts)

    def emits(self, text: str, size: int = 1) -> list[CommittedTokens]:
        """Returns the text as events that commit `size` tokens each."""
        tokens = self.codec.encode(text)
        return [CommittedTokens(tokens[start : start + size], 0, 0) for start in range(0, len(tokens), size)]

    @property
    def prompt(self) -> tuple[int, ...]:
        """Returns the prompt of the only request so far."""
        (generation,) = self.generator.generations
        return generation.prompt


@asynccontextmanager
async def asgi_front(
    codec: TextCodec,
    server: Mapping[str, Any] | None = None,
    *,
    key: str = "none",
    defaults: GenerationDefaults = NO_DEFAULTS,
    further: Sequence[Route] = (),
    draft_prompts: DraftPrompts | None = None,
) -> AsyncIterator[AsgiFront]:
    """Yields a new application; fails if a session still runs after the test."""
    generator = ScriptedGenerator()
    app = toy_api(
        generator, codec, config_of(server or {}), defaults=defaults, further=further, draft_prompts=draft_prompts
    )
    async with http_client(app) as http, openai_client(app, key) as client:
        yield AsgiFront(app, generator, codec, client, http)
    assert not generator.running
