"""The HTTP endpoints, as one ASGI application.

The way of a request: its body is read and parsed, its prompts become tokens, each choice becomes a session, the
sessions' committed tokens become text, and the text goes out whole or as server-sent events. A client that leaves
cancels its sessions. Knows nothing of drafters, targets or Ray.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar, TypeVarTuple, Unpack

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cluster.config import SlipstreamConfig
from serve_app.http.answers import Choice, Delta, Transcript, follow
from serve_app.http.bodies import Bodies
from serve_app.http.failures import failure_of
from serve_app.http.formats import ChatDialect, CompletionDialect, Dialect, Head, Part
from serve_app.http.generation import Generator
from serve_app.http.metrics import Metrics
from serve_app.http.resolution import Draw, Terms, agree, resolve
from serve_app.http.streaming import EventStream, as_event, as_json, while_connected
from serve_app.http.text import StopMatcher, TextCodec
from serve_app.http.watching.records import RequestRecord
from serve_app.http.watching.request_log import logged
from serve_app.http.watching.request_spans import NoRequestSpans, RequestSpans
from serve_app.http.wire.bounds import RequestBounds
from serve_app.http.wire.parsing import parse
from serve_app.http.wire.replies import CompletionTokensDetails, HealthReport, ModelCard, ModelList, Trace, Usage
from serve_app.http.wire.schemas import GenerationRequest

WORKERS = 2  # threads that parse and tokenise; more would only take the interpreter from the event loop more often
HELD_BODIES = 64  # of the largest size, which those being read may hold together

RequestT = TypeVar("RequestT", bound=GenerationRequest)
ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")


def create_api(
    generator: Generator,
    text: TextCodec,
    config: SlipstreamConfig,
    metrics: Metrics,
    health: Callable[[], Awaitable[HealthReport]],
    spans: RequestSpans | None = None,
    exposition: Callable[[], Awaitable[bytes]] | None = None,
) -> FastAPI:
    """The application; `text` is the served model's codec, `health` says how `generator` is.

    `exposition` is what Prometheus is told, if not `metrics` alone.
    """
    api = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, openapi_url=None)
    server = config.server
    bodies = Bodies(server.max_body_bytes, HELD_BODIES * server.max_body_bytes, server.body_timeout_s)
    service = Service(generator, text, config, metrics, bodies, spans or NoRequestSpans())
    for endpoint in (ApiEndpoint(CompletionDialect(), service), ApiEndpoint(ChatDialect(), service)):
        api.router.routes.append(Route(endpoint.path, endpoint, methods=["POST"]))
    models = ModelList(data=(ModelCard(id=config.model.name, created=int(time.time())),))

    @api.get("/v1/models")
    async def list_models() -> ModelList:
        return models

    @api.get("/v1/models/{name:path}")
    async def show_model(name: str) -> ModelCard:
        if name != models.data[0].id:
            raise HTTPException(404, f"the model '{name}' does not exist; this server has '{models.data[0].id}'")
        return models.data[0]

    @api.get("/health")
    async def report_health() -> Response:
        report = await health()
        return as_json(report, 200 if report.status == "ok" else 503)

    @api.get("/metrics")
    async def expose_metrics() -> Response:
        told = metrics.exposition() if exposition is None else await exposition()
        return Response(told, media_type=CONTENT_TYPE_LATEST)

    @api.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> Response:
        return failure_of(error).response

    return api


@dataclass(frozen=True, slots=True)
class Service:
    """What every request is served with."""

    generator: Generator
    text: TextCodec
    config: SlipstreamConfig
    metrics: Metrics
    bodies: Bodies
    spans: RequestSpans
    draw: Draw = lambda: secrets.randbits(64)
    clock: Callable[[], float] = time.monotonic
    workers: Executor = field(default_factory=lambda: ThreadPoolExecutor(WORKERS, "request"))

    @property
    def bounds(self) -> RequestBounds:
        """What the schemas are to refuse before they look into it."""
        server = self.config.server
        prompts = min(server.max_request_sessions, server.max_requests)
        return RequestBounds(prompts=prompts, prompt_tokens=self.config.model.max_context - 1)

    async def aside(self, work: Callable[[Unpack[ArgsT]], ResultT], *args: *ArgsT) -> ResultT:
        """Does work of a request beside the event loop, a few at a time."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *args)


class ApiEndpoint(Generic[RequestT]):
    """One endpoint that generates, as an ASGI application: the whole exchange is one call."""

    def __init__(self, dialect: Dialect[RequestT], service: Service) -> None:
        self.path = dialect.path
        self._dialect = dialect
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        request = Request(scope, receive)
        with (
            service.metrics.request(self._dialect.endpoint) as record,
            service.spans.request(self._dialect.endpoint, self.path, request.headers, record),
            logged(self._dialect.endpoint, record, service.clock),
        ):
            response = await self._respond(request, record)
            with suppress(ClientDisconnect):  # the record says how far the answer came
                await response(scope, receive, send)

    async def _respond(self, request: Request, record: RequestRecord) -> Response:
        try:
            self._service.generator.check_room(1)
            async with self._service.bodies.read(request) as body:
                answer = await self._prepare(body, record)
            self._service.metrics.prompt(answer.prompt_tokens)
            if not answer.request.stream:
                whole = await while_connected(request.receive, answer.whole())
                record.status = 200
                return as_json(whole)
            events = answer.events()
            first = await while_connected(request.receive, anext(events))  # a failure up to here has its own status
            return EventStream(first, events, record)
        except Exception as error:  # noqa: BLE001  # all of a request ends here: whatever failed, the client is told
            failure = failure_of(error)
            record.status = failure.status
            return failure.response

    async def _prepare(self, body: bytes, record: RequestRecord) -> "ApiAnswer[RequestT]":
        """Checks all that it can before it tokenises; both take a while and leave the event loop to others."""
        request, terms = await self._service.aside(self._agree, body)
        self._service.generator.check_room(terms.sessions)
        record.request = request
        return await self._service.aside(self._resolve, request, terms, record)

    def _agree(self, body: bytes) -> tuple[RequestT, Terms]:
        service = self._service
        request = parse(self._dialect.schema, body, service.bounds)
        return request, agree(request, config=service.config, max_token_chars=service.text.max_token_chars)

    def _resolve(self, request: RequestT, terms: Terms, record: RequestRecord) -> "ApiAnswer[RequestT]":
        service = self._service
        dialect = self._dialect
        prompts = dialect.prompts(request, service.text)
        generations = resolve(
            request,
            terms,
            prompts,
            context=service.config.model.max_context,
            eos_ids=service.text.eos_ids,
            vocabulary=service.text.vocabulary,
            draw=service.draw,
            traceparent=record.traceparent,
        )
        interval = service.config.server.stream_interval
        choices = [
            Choice(generation, Transcript(index, service.text.detokenizer(), StopMatcher(request.stop), interval))
            for index, generation in enumerate(generations)
        ]
        name = request.request_id or f"{service.draw():016x}"
        head = Head(id=f"{dialect.id_prefix}{name}", created=int(time.time()), model=request.model)
        record.response_id = head["id"]
        record.sessions = [generation.session for generation in generations]
        record.prompt_tokens = sum(map(len, prompts))
        record.choices = [choice.transcript for choice in choices]
        return ApiAnswer(dialect, service, request, head, choices, record.prompt_tokens)


@dataclass(frozen=True, slots=True)
class ApiAnswer(Generic[RequestT]):
    """The answer to one request, to be had whole or as events, once."""

    dialect: Dialect[RequestT]
    service: Service
    request: RequestT
    head: Head
    choices: list[Choice]
    prompt_tokens: int

    async def whole(self) -> BaseModel:
        """The answer when all choices have ended."""
        async with aclosing(self._deltas()) as deltas:
            async for _ in deltas:
                pass
        return self.dialect.whole(self.head, [choice.transcript for choice in self.choices], self._usage())

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events; the first comes with the first text."""
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                for part in _parts(delta, self.dialect.has_openings):
                    yield self._event(self.dialect.chunk(self.head, part, self._usage_so_far()))
        if self.request.stream_options.include_usage:
            yield self._event(self.dialect.closing(self.head, self._usage()))
        yield as_event("[DONE]")

    def _deltas(self) -> AsyncGenerator[Delta, None]:
        return follow(self.service.generator, self.choices, self.service.metrics, self.service.clock)

    def _event(self, chunk: BaseModel) -> str:
        options = self.request.stream_options.include_usage, self.request.speculation.trace
        left_out = {name for name, wanted in zip(("usage", "slipstream"), options, strict=True) if not wanted}
        return as_event(chunk.model_dump_json(exclude=left_out))

    def _usage_so_far(self) -> Usage | None:
        return self._usage() if self.request.stream_options.continuous_usage_stats else None

    def _usage(self) -> Usage:
        transcripts = [choice.transcript for choice in self.choices]
        completion_tokens = sum(transcript.tokens for transcript in transcripts)
        details = CompletionTokensDetails(
            accepted_prediction_tokens=sum(transcript.accepted for transcript in transcripts),
            rejected_prediction_tokens=sum(transcript.rejected for transcript in transcripts),
        )
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self.prompt_tokens + completion_tokens,
            completion_tokens_details=details,
        )


def _parts(delta: Delta, with_opening: bool) -> Iterator[Part]:
    """A delta as chunks: an opening in the first, the text, the end in the last."""
    trace = Trace(tokens=delta.tokens, accepted=delta.accepted, pieces=delta.pieces)
    if delta.is_first and with_opening:
        yield Part(delta.index, opening=True)
    if delta.text:
        yield Part(delta.index, delta.text, trace=trace)
    if delta.finish is not None:
        yield Part(delta.index, finish=delta.finish, trace=Trace() if delta.text else trace)
