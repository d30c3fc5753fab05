"""The HTTP endpoints as one ASGI application.

A request's body is read and parsed, its prompts are tokenised, each choice becomes a session, the sessions' committed
tokens become text, and the text is sent whole or as server-sent events. A client that disconnects cancels its sessions.
This module knows nothing of drafters, targets or Ray.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, TypeVarTuple, Unpack

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cluster.config import SlipstreamConfig
from cluster.errors import RequestError
from cluster.routing.ledger import Generation
from serve_app.api.access import (
    CALLER,
    REQUEST_ID,
    AdminPort,
    AuthMiddleware,
    Caller,
    Callers,
    CrossOrigin,
    Exchange,
    asked_name,
    check_name,
)
from serve_app.api.choice_stream import ChoiceStream
from serve_app.api.endpoints import (
    ApiFormat,
    ChatFormat,
    CompletionFormat,
    EventWriter,
    Head,
    ResponsesFormat,
    Tokenizing,
    ToldChoice,
)
from serve_app.api.failures import failure_of
from serve_app.api.fields import RequestBounds, RequestPart, parse
from serve_app.api.generation import AnswerForm, Choice, ChoiceText, Delta, Generator, follow, metrics_of, usage_of
from serve_app.api.grammars import GrammarCheck
from serve_app.api.limits import Bodies, Deadline
from serve_app.api.metrics import Metrics
from serve_app.api.observability import NoRequestSpans, RequestRecord, RequestSpans, logged
from serve_app.api.openapi import HEADERS, description, docs_page
from serve_app.api.replies import HealthReport, ModelCard, ModelList, ProbeReport, Usage, VersionReport
from serve_app.api.schemas import DetokenizeRequest, GenerationRequest, TokenizeRequest
from serve_app.api.served_model import find_card, fingerprint, model_list, version
from serve_app.api.streaming import EventStream, as_json, first_of, while_connected
from serve_app.api.text import StopMatcher, TextCodec
from serve_app.api.validation import (
    NO_DEFAULTS,
    Draw,
    GenerationDefaults,
    ValidatedRequest,
    agree,
    bad_words_of,
    resolve,
    truncated,
)


def add_plain_routes(api: FastAPI, config: SlipstreamConfig) -> None:
    """Adds routes with fixed answers: model names, version, API description."""
    models = model_list(config)
    described = description(version(), with_keys=bool(config.server.keys))
    document = json.dumps(described)
    page = docs_page(described)

    @api.get("/v1/models")
    async def list_models() -> ModelList:
        return models

    @api.get("/v1/models/{name:path}")
    async def show_model(name: str) -> ModelCard:
        return find_card(models, name)

    @api.get("/version")
    async def report_version() -> VersionReport:
        return VersionReport(version=version())

    @api.get("/openapi.json")
    async def describe() -> Response:
        return Response(document, media_type="application/json")

    @api.get("/docs")
    async def show_docs() -> Response:
        return HTMLResponse(page, headers=HEADERS)


WORKERS = 2  # threads that parse and tokenise; more threads would contend with the event loop for the GIL
HELD_BODIES = 64  # bodies of the largest size whose bytes may be held together

RequestT = TypeVar("RequestT", bound=GenerationRequest)
PartT = TypeVar("PartT", bound=RequestPart)
ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")


def create_api(
    generator: Generator,
    text: TextCodec,
    config: SlipstreamConfig,
    metrics: Metrics,
    health: Callable[[], Awaitable[HealthReport]],
    defaults: GenerationDefaults = NO_DEFAULTS,
    checkpoint: str = "",
    further: Sequence[Route] = (),
    spans: RequestSpans | None = None,
    exposition: Callable[[], Awaitable[bytes]] | None = None,
) -> FastAPI:
    """Builds the application from the model's codec (`text`), its `checkpoint` fingerprint and a `generator` of tokens.

    `health` reports the generator's state, `defaults` fill in parameters that requests leave out, `further` routes are
    served beside the API, and `exposition` replaces `metrics` as the source of Prometheus' page.
    """
    api = FastAPI(title="Slipstream", docs_url=None, redoc_url=None, openapi_url=None)
    server = config.server
    bodies = Bodies(
        max_bytes=server.max_body_bytes,
        max_held_bytes=HELD_BODIES * server.max_body_bytes,
        max_reading=server.max_requests,  # including those in flight, at most what Serve sends to one router
        timeout_s=server.body_timeout_s,
    )
    service = Service(
        generator,
        text,
        config,
        metrics,
        bodies,
        GrammarCheck(text.grammars()),
        fingerprint(config, checkpoint),
        defaults,
        spans or NoRequestSpans(),
    )
    for endpoint in (
        ApiEndpoint(CompletionFormat(), service),
        ApiEndpoint(ChatFormat(), service),
        ApiEndpoint(ResponsesFormat(), service),
    ):
        api.router.routes.append(Route(endpoint.path, endpoint, methods=["POST"]))
    tokenizing = Tokenizing(text.tokenizer, text.template, config, text.max_token_chars, text.vocabulary)
    for plain in (
        PlainEndpoint("/tokenize", TokenizeRequest, tokenizing.tokenize, service),
        PlainEndpoint("/detokenize", DetokenizeRequest, tokenizing.detokenize, service),
    ):
        api.router.routes.append(Route(plain.path, plain, methods=["POST"]))
    add_plain_routes(api, config)
    api.router.routes.extend(further)

    @api.get("/health")
    async def report_health() -> Response:
        report = await health()
        return as_json(report, 200 if report.status == "ok" else 503)

    @api.get("/health/live")
    async def report_liveness() -> ProbeReport:
        return ProbeReport(status="ok")

    @api.get("/health/ready")
    async def report_readiness() -> Response:
        status = (await health()).status
        return as_json(ProbeReport(status=status), 200 if status == "ok" else 503)

    @api.get("/metrics")
    async def expose_metrics() -> Response:
        told = metrics.exposition() if exposition is None else await exposition()
        return Response(told, media_type=CONTENT_TYPE_LATEST)

    for route in api.routes:
        if isinstance(route, Route) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")  # the server then sends no body; Starlette does this only for its own routes

    api.add_middleware(AuthMiddleware, callers=Callers.of(server.keys))
    if server.admin.port:
        api.add_middleware(AdminPort)
    if server.cors_origins:  # before authentication: browsers send preflight requests without a key
        api.add_middleware(
            CrossOrigin, allow_origins=server.cors_origins, allow_methods=("GET", "POST"), allow_headers=("*",)
        )

    @api.exception_handler(HTTPException)
    @api.exception_handler(RequestError)
    async def refuse(_: Request, error: HTTPException | RequestError) -> Response:
        return failure_of(error).response

    return api


@dataclass(frozen=True, slots=True)
class Service:
    """Shared state of all endpoints."""

    generator: Generator
    text: TextCodec
    config: SlipstreamConfig
    metrics: Metrics
    bodies: Bodies
    grammars: GrammarCheck
    fingerprint: str
    defaults: GenerationDefaults = NO_DEFAULTS
    spans: RequestSpans = NoRequestSpans()
    draw: Draw = lambda: secrets.randbits(64)
    clock: Callable[[], float] = time.monotonic
    workers: Executor = field(default_factory=lambda: ThreadPoolExecutor(WORKERS, "request"))

    @property
    def bounds(self) -> RequestBounds:
        """Returns the list lengths that schemas check before they validate elements."""
        server = self.config.server
        prompts = min(server.max_request_sessions, server.max_requests)
        return RequestBounds(prompts=prompts, prompt_tokens=self.config.model.max_context - 1)

    def new_name(self) -> str:
        """Returns an id for a request that came without one."""
        return f"{self.draw():016x}"

    async def aside(self, work: Callable[[Unpack[ArgsT]], ResultT], *args: *ArgsT) -> ResultT:
        """Runs work on one of a few threads, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *args)


class ApiEndpoint(Generic[RequestT]):
    """One generating endpoint as an ASGI application; one call handles the whole exchange."""

    def __init__(self, dialect: ApiFormat[RequestT], service: Service) -> None:
        self.path = dialect.path
        self._dialect = dialect
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        caller: Caller = scope[CALLER]
        request = Request(scope, receive)
        with (
            service.metrics.request(self._dialect.endpoint) as record,
            service.spans.request(self._dialect.endpoint, self.path, request.headers, record),
            logged(self._dialect.endpoint, record, service.clock),
            caller.exchange() as exchange,
        ):
            record.name = asked_name(request) or service.new_name()
            deadline = Deadline.within(service.config.server.request_timeout_s)
            response = await self._respond(request, record, exchange, deadline)
            response.headers[REQUEST_ID] = record.name
            with suppress(ClientDisconnect):  # the record says how far the answer got
                await response(scope, receive, send)

    async def _respond(
        self, request: Request, record: RequestRecord, exchange: Exchange, deadline: Deadline
    ) -> Response:
        try:
            self._service.generator.check_room(1)
            check_name(request)
            async with deadline.kept():
                return await self._answer(request, record, exchange, deadline)
        except Exception as error:  # noqa: BLE001  # all of a request ends here: whatever failed, the client is told
            failure = failure_of(error)
            record.status = failure.status
            return failure.response

    async def _answer(
        self, request: Request, record: RequestRecord, exchange: Exchange, deadline: Deadline
    ) -> Response:
        async with self._service.bodies.read(request) as body:
            answer = await self._prepare(body, exchange, asked_name(request), record)
        self._service.metrics.prompt(answer.prompt_tokens)
        if not answer.stream:
            whole = await while_connected(request.receive, answer.whole())
            record.status = 200
            return as_json(whole)
        events = answer.events()
        keep_alive_s = self._service.config.server.stream_keep_alive_s
        first = await first_of(events, request.receive, keep_alive_s)  # a failure up to here has its own status
        return EventStream(first, events, record, keep_alive_s, deadline, answer.writer.failed)

    async def _prepare(self, body: bytes, exchange: Exchange, header: str | None, record: RequestRecord) -> "ApiAnswer":
        """Checks what it can before tokenising. Both run off the event loop."""
        request, terms = await self._service.aside(self._agree, body)
        exchange.caller.check(request)
        self._service.generator.check_room(terms.sessions)
        if terms.grammar is not None:
            await self._service.grammars.check(terms.grammar)
        exchange.take(terms.sessions)
        record.request = request
        record.name = header or request.request_id or record.name
        return await self._service.aside(self._resolve, request, terms, exchange.caller, record)

    def _agree(self, body: bytes) -> tuple[RequestT, ValidatedRequest]:
        service = self._service
        request = service.defaults.applied(self._dialect.parse(body, service.bounds))
        terms = agree(request, config=service.config, max_token_chars=service.text.max_token_chars)
        self._dialect.check(request, service.text)
        return request, replace(terms, grammar=self._dialect.held(request, service.text, terms.grammar))

    def _resolve(
        self, request: RequestT, terms: ValidatedRequest, caller: Caller, record: RequestRecord
    ) -> "ApiAnswer":
        service = self._service
        dialect = self._dialect
        context = service.config.model.max_context
        prompts = [truncated(request, prompt, context) for prompt in dialect.prompts(request, service.text)]
        resolved = resolve(
            request,
            terms,
            prompts,
            context=context,
            eos_ids=service.text.eos_ids,
            vocabulary=service.text.vocabulary,
            draw=service.draw,
            bad_words=bad_words_of(request, service.text),
            traceparent=record.traceparent,
        )
        generations = caller.bounded(resolved)
        head = Head(
            id=f"{dialect.id_prefix}{request.request_id or record.name}",
            created=int(time.time()),
            model=request.model,
            system_fingerprint=service.fingerprint,
        )
        told = [self._choice(request, index, generation) for index, generation in enumerate(generations)]
        record.response_id = head["id"]
        record.sessions = [generation.session for generation in generations]
        record.prompt_tokens = sum(map(len, prompts))
        record.choices = [choice.transcript for choice, _ in told]
        writer = dialect.writer(request, head, service.text)
        return ApiAnswer(writer, service, request.stream, told, record.prompt_tokens)

    def _choice(self, request: RequestT, index: int, generation: Generation) -> ToldChoice:
        text = self._service.text
        dialect = self._dialect
        skips = request.skip_special_tokens and not dialect.reads_parts(text)
        echoed = generation.prompt if request.is_echoed else ()
        form = AnswerForm(
            stop_ids=frozenset(generation.stop_ids),
            keeps_stop=request.include_stop_str_in_output,
            named_stop_ids=frozenset(request.stop_token_ids) - (set() if request.ignore_eos else set(text.eos_ids)),
            min_tokens=request.min_tokens,
            echoed=echoed,
            echoed_text=text.decode(echoed, skips) if echoed else "",
        )
        stops = StopMatcher(request.stop, request.include_stop_str_in_output)
        interval = self._service.config.server.stream_interval
        transcript = ChoiceText(
            index, text.detokenizer(skips, request.spaces_between_special_tokens), stops, interval, form
        )
        reader = dialect.reader(request, text, generation.prompt)
        telling = ChoiceStream(index, reader, dialect.telling(request), self._service.draw)
        return ToldChoice(Choice(generation, transcript), telling)


@dataclass(frozen=True, slots=True)
class PlainEndpoint(Generic[PartT]):
    """An endpoint that computes its answer from the body alone; `work` runs off the event loop."""

    path: str
    schema: type[PartT]
    work: Callable[[PartT], BaseModel]
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with suppress(ClientDisconnect):
            response = await self._respond(request, scope[CALLER])
            response.headers[REQUEST_ID] = asked_name(request) or self.service.new_name()
            await response(scope, receive, send)

    async def _respond(self, request: Request, caller: Caller) -> Response:
        try:
            check_name(request)
            with caller.exchange() as exchange:
                exchange.take(1)  # this work counts against the key's limit too
                async with self.service.bodies.read(request) as body:
                    return as_json(await self.service.aside(self._answer, body))
        except Exception as error:  # noqa: BLE001  # all of a request ends here: whatever failed, the client is told
            return failure_of(error).response

    def _answer(self, body: bytes) -> BaseModel:
        return self.work(parse(self.schema, body, self.service.bounds))


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """The answer to one request, available once, whole or as events."""

    writer: EventWriter
    service: Service
    stream: bool
    told: list[ToldChoice]
    prompt_tokens: int

    async def whole(self) -> BaseModel:
        """Returns the answer after all choices have ended."""
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                self.told[delta.index].telling.parts(delta)
        return self.writer.whole(self.told, self._usage())

    async def events(self) -> AsyncGenerator[str, None]:
        """Yields the answer as server-sent events; the first carries the first text."""
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                for part in self.told[delta.index].telling.parts(delta):
                    for event in self.writer.part(part, self._usage):
                        yield event
        metrics = metrics_of([choice for choice, _ in self.told])
        for event in self.writer.closing(self._usage(), metrics):
            yield event

    def _deltas(self) -> AsyncGenerator[Delta, None]:
        choices = [choice for choice, _ in self.told]
        return follow(self.service.generator, choices, self.service.metrics, self.service.clock)

    def _usage(self) -> Usage:
        reasoning_tokens = sum(telling.reasoning_tokens for _, telling in self.told)
        return usage_of([choice for choice, _ in self.told], self.prompt_tokens, reasoning_tokens)
