"""Routes and endpoints of the HTTP API, as one ASGI application.

`ApiEndpoint` serves the generating endpoints: it parses the body, checks the request, tokenizes its prompts, starts one
session per choice, and sends the answer whole or as server-sent events. A client that disconnects cancels its sessions.
`ComputedEndpoint` serves /tokenize and /detokenize. This module is independent of drafters, targets and Ray.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Generic, TypeVar, TypeVarTuple, Unpack

from fastapi import FastAPI
from opentelemetry.trace import Tracer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from actors.tracing import NO_TRACER
from cluster.config import ServerConfig, SlipstreamConfig
from cluster.errors import CapacityError, DrainingError, RequestError
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
    check_request_id,
    request_id_of,
)
from serve_app.api.choices import Choice, ChoiceStream, ChoiceText, Delta, TextOptions
from serve_app.api.draft_prompt import DraftPrompts
from serve_app.api.failures import failure_of
from serve_app.api.fields import RequestBounds, parse
from serve_app.api.formats import (
    AnswerWriter,
    ApiFormat,
    ChatFormat,
    CompletionFormat,
    Head,
    ResponsesFormat,
    Tokenizing,
)
from serve_app.api.generation import Generator, follow, metrics_of, usage_of
from serve_app.api.grammars import GrammarCheck, RequestedGrammar
from serve_app.api.limits import Bodies, Deadline
from serve_app.api.metrics import Metrics
from serve_app.api.observability import RequestRecord, RequestSpans, logged
from serve_app.api.openapi import HEADERS, KEY, BodyRoute, docs_page, errors, openapi_document
from serve_app.api.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    HealthReport,
    ModelCard,
    ModelList,
    ProbeReport,
    ScoredChatCompletion,
    Usage,
    VersionReport,
)
from serve_app.api.request_schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeReply,
    TokenizeRequest,
)
from serve_app.api.responses_schemas import ResponseReply, ResponsesRequest, ResponseStreamEvent
from serve_app.api.served_model import check_model, find_card, fingerprint, model_list, version
from serve_app.api.streaming import EventStream, as_json, first_of, while_connected
from serve_app.api.text import StopMatcher, TextCodec
from serve_app.api.tool_calls import PlainReader
from serve_app.api.validation import (
    NO_DEFAULTS,
    Draw,
    GenerationDefaults,
    bad_words_of,
    check_request,
    learning_source,
    resolve,
    truncated,
)

WORKERS = 2  # threads that parse and tokenize; more threads would contend with the event loop for the GIL
MAX_HELD_BODIES = 64  # memory limit for bodies, in multiples of the maximum body size

RequestT = TypeVar("RequestT", bound=GenerationRequest)
PartT = TypeVar("PartT", TokenizeRequest, DetokenizeRequest)
ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")
Health = Callable[[], Awaitable[HealthReport]]
Exposition = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True)
class ModelService:
    """One model's generator, text codec and settings, as the endpoints use them."""

    generator: Generator
    text: TextCodec
    config: SlipstreamConfig  # of this model alone
    defaults: GenerationDefaults = NO_DEFAULTS  # replace omitted request parameters
    checkpoint: str = ""  # fingerprint
    drafts_are_translated: Callable[[], bool] = lambda: False  # while true, rejection sampling is refused
    draft_prompts: DraftPrompts | None = None  # None: drafters read the target's prompt

    @cached_property
    def grammars(self) -> GrammarCheck:
        return GrammarCheck(self.text.grammars())

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.config, self.checkpoint)


def create_api(
    models: Sequence[ModelService],
    config: SlipstreamConfig,
    metrics: Metrics,
    health: Health,
    further: Sequence[Route] = (),
    tracer: Tracer = NO_TRACER,
    exposition: Exposition | None = None,
) -> FastAPI:
    """Builds the application for the models of `config`.

    `health` reports the generators' state. `further` adds routes. `exposition` replaces `metrics` as the source of
    /metrics.
    """
    api = FastAPI(title="Slipstream", version=version(), docs_url=None, redoc_url=None)
    server = config.server
    bodies = Bodies(
        max_bytes=server.max_body_bytes,
        max_held_bytes=MAX_HELD_BODIES * server.max_body_bytes,
        max_reading=server.max_requests,  # Serve sends a router twice this number; the rest run
        timeout_s=server.body_timeout_s,
    )
    names = {name: model for model in models for name in model.config.api_names}
    service = Service(names, server, metrics, bodies, RequestSpans(tracer))
    api.router.routes.extend(_body_routes(service, needs_key=bool(server.keys)))
    _add_model_routes(api, config)
    _add_health_routes(api, health)
    _add_metrics_route(api, metrics, exposition)
    _add_docs(api, needs_key=bool(server.keys))
    api.router.routes.extend(further)
    for route in api.routes:
        if isinstance(route, Route) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")  # the server sends no body for HEAD; Starlette adds HEAD only to its own routes

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


def _body_routes(service: "Service", *, needs_key: bool) -> list[BodyRoute]:
    """Returns the routes of endpoints that parse their own bodies."""
    route = partial(BodyRoute, needs_key=needs_key)
    return [
        route(
            ChatFormat.path,
            ApiEndpoint(ChatFormat(), service),
            summary="Create a chat completion",
            body=ChatRequest,
            reply=ChatCompletion | ScoredChatCompletion,
            event=ChatChunk,
        ),
        route(
            CompletionFormat.path,
            ApiEndpoint(CompletionFormat(), service),
            summary="Create a completion",
            body=CompletionRequest,
            reply=Completion,
            event=CompletionChunk,
        ),
        route(
            ResponsesFormat.path,
            ApiEndpoint(ResponsesFormat(), service),
            summary="Create a response",
            body=ResponsesRequest,
            reply=ResponseReply,
            event=ResponseStreamEvent,
            ends_with_done=False,
        ),
        route(
            "/tokenize",
            ComputedEndpoint(TokenizeRequest, Tokenizing.tokenize, service),
            summary="Tokenize a text or a conversation",
            body=TokenizeRequest,
            reply=TokenizeReply,
        ),
        route(
            "/detokenize",
            ComputedEndpoint(DetokenizeRequest, Tokenizing.detokenize, service),
            summary="Detokenize a list of tokens",
            body=DetokenizeRequest,
            reply=DetokenizeReply,
        ),
    ]


def _add_model_routes(api: FastAPI, config: SlipstreamConfig) -> None:
    models = model_list(config)
    needs_key = bool(config.server.keys)
    dependencies = [KEY] if needs_key else []
    key_errors = (401,) if needs_key else ()

    @api.get("/v1/models", dependencies=dependencies, responses=errors(*key_errors), summary="List the served models")
    async def list_models() -> ModelList:
        return models

    @api.get(
        "/v1/models/{name:path}",
        dependencies=dependencies,
        responses=errors(404, *key_errors),
        summary="Look up a served model",
    )
    async def show_model(name: str) -> ModelCard:
        return find_card(models, name)

    @api.get("/version", summary="Report the server's version")
    async def report_version() -> VersionReport:
        return VersionReport(version=version())


def _add_health_routes(api: FastAPI, health: Health) -> None:
    @api.get(
        "/health",
        responses={503: {"model": HealthReport, "description": "Requests cannot be served"}},
        summary="Report whether requests can be served, and the audit's state",
    )
    async def report_health(response: Response) -> HealthReport:
        report = await health()
        response.status_code = 200 if report.status == "ok" else 503
        return report

    @api.get("/health/live", summary="Report whether the process responds")
    async def report_liveness() -> ProbeReport:
        return ProbeReport(status="ok")

    @api.get(
        "/health/ready",
        responses={503: {"model": ProbeReport, "description": "Requests cannot be served"}},
        summary="Report whether requests can be served",
    )
    async def report_readiness(response: Response) -> ProbeReport:
        status = (await health()).status
        response.status_code = 200 if status == "ok" else 503
        return ProbeReport(status=status)


def _add_metrics_route(api: FastAPI, metrics: Metrics, exposition: Exposition | None) -> None:
    @api.get("/metrics", response_class=PlainTextResponse, summary="Export all processes' metrics for Prometheus")
    async def expose_metrics() -> Response:
        page = metrics.exposition() if exposition is None else await exposition()
        return Response(page, media_type=CONTENT_TYPE_LATEST)


def _add_docs(api: FastAPI, *, needs_key: bool) -> None:
    document = openapi_document(api, needs_key=needs_key)
    api.openapi = lambda: document  # type: ignore[method-assign]  # FastAPI serves it at /openapi.json
    page = docs_page(document)

    @api.get("/docs", include_in_schema=False)
    async def show_docs() -> Response:
        return HTMLResponse(page, headers=HEADERS)


@dataclass(frozen=True, slots=True)
class Service:
    """Shared state of all endpoints."""

    models: Mapping[str, ModelService]  # by API name
    server: ServerConfig
    metrics: Metrics
    bodies: Bodies
    spans: RequestSpans
    draw: Draw = lambda: secrets.randbits(64)
    clock: Callable[[], float] = time.monotonic
    workers: Executor = field(default_factory=lambda: ThreadPoolExecutor(WORKERS, "request"))

    @property
    def bounds(self) -> RequestBounds:
        """Returns the maximum list lengths, which schemas check before elements."""
        prompts = min(self.server.max_request_sessions, self.server.max_requests)
        context = max(model.config.model.max_context for model in self.models.values())
        return RequestBounds(prompts=prompts, prompt_tokens=context - 1)

    def model(self, name: str | None) -> ModelService:
        """Returns the model with this API name; None: the first one. Raises UnknownModelError."""
        if name is None:
            return next(iter(self.models.values()))
        check_model(name, list(self.models))
        return self.models[name]

    def check_room(self) -> None:
        """Raises a generator's refusal if all generators refuse further sessions."""
        for model in self.models.values():
            try:
                model.generator.check_room(1)
            except (CapacityError, DrainingError) as error:
                refusal = error
            else:
                return
        raise refusal

    def new_request_id(self) -> str:
        """Returns an id for a request without one."""
        return f"{self.draw():016x}"

    async def in_thread(self, work: Callable[[Unpack[ArgsT]], ResultT], *args: *ArgsT) -> ResultT:
        """Runs `work` on a worker thread, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *args)


class ApiEndpoint(Generic[RequestT]):
    """ASGI application of one generating endpoint; each call handles a request and its whole response."""

    def __init__(self, api_format: ApiFormat[RequestT], service: Service) -> None:
        self._format = api_format
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        endpoint = self._format.endpoint
        caller: Caller = scope[CALLER]
        request = Request(scope, receive)
        with (
            service.metrics.request(endpoint) as record,
            service.spans.request(endpoint, self._format.path, request.headers, record),
            logged(endpoint, record, service.clock),
            caller.exchange() as exchange,
        ):
            record.name = request_id_of(request) or service.new_request_id()
            deadline = Deadline.within(service.server.request_timeout_s)
            response = await self._respond(request, record, exchange, deadline)
            response.headers[REQUEST_ID] = record.name
            with suppress(ClientDisconnect):  # the record shows how much was sent
                await response(scope, receive, send)

    async def _respond(
        self, request: Request, record: RequestRecord, exchange: Exchange, deadline: Deadline
    ) -> Response:
        try:
            self._service.check_room()
            check_request_id(request)
            async with deadline.enforced():
                return await self._answer(request, record, exchange, deadline)
        except Exception as error:  # noqa: BLE001  # every failure becomes an error response
            failure = failure_of(error)
            record.status = failure.status
            return failure.response

    async def _answer(
        self, request: Request, record: RequestRecord, exchange: Exchange, deadline: Deadline
    ) -> Response:
        service = self._service
        async with service.bodies.read(request) as body:
            answer = await self._prepare(body, exchange, request_id_of(request), record)
        service.metrics.of(record.model).prompt(answer.prompt_tokens)
        if not answer.stream:
            await while_connected(request.receive, answer.end())
            # Only scores need a thread: an answer may have a million of them.
            response = await service.in_thread(answer.whole) if answer.is_scored else answer.whole()
            record.status = 200
            return response
        events = answer.events()
        keep_alive_s = service.server.stream_keep_alive_s
        first = await first_of(events, request.receive, keep_alive_s)  # an earlier failure still sets the HTTP status
        return EventStream(first, events, record, keep_alive_s, deadline, answer.writer.failed)

    async def _prepare(self, body: bytes, exchange: Exchange, header: str | None, record: RequestRecord) -> "ApiAnswer":
        """Parses and checks the request, then tokenizes its prompts, both off the event loop."""
        service = self._service
        request, model, grammar = await service.in_thread(self._parse, body)
        service.metrics.attribute(record, model.config.adapter_of(request.model) or model.config.model.name)
        exchange.caller.check(request)
        sessions = request.prompt_count * request.n
        model.generator.check_room(sessions)
        if grammar is not None:
            grammars = await service.in_thread(lambda: model.grammars)  # first use: reads the vocabulary for seconds
            await grammars.check(grammar)
        exchange.take(sessions)
        record.request = request
        record.name = header or request.request_id or record.name
        return await service.in_thread(self._start, request, model, grammar, exchange.caller, record)

    def _parse(self, body: bytes) -> tuple[RequestT, ModelService, RequestedGrammar | None]:
        """Returns a checked request, its model, and the grammar of its answer."""
        parsed = self._format.parse(body, self._service.bounds)
        model = self._service.model(parsed.model)
        request = model.defaults.applied(parsed)
        check_request(
            request,
            config=model.config,
            max_token_chars=model.text.max_token_chars,
            drafts_are_translated=model.drafts_are_translated(),
        )
        self._format.check(request, model.text)
        return request, model, self._format.grammar(request, model.text)

    def _start(
        self,
        request: RequestT,
        model: ModelService,
        grammar: RequestedGrammar | None,
        caller: Caller,
        record: RequestRecord,
    ) -> "ApiAnswer":
        """Tokenizes the prompts and returns a lazy answer; reading it starts the sessions."""
        service = self._service
        context = model.config.model.max_context
        prompts = [truncated(request, prompt, context) for prompt in self._format.prompts(request, model.text)]
        generations = resolve(
            request,
            prompts,
            config=model.config,
            eos_ids=model.text.eos_ids,
            vocabulary=model.text.vocabulary,
            draw=service.draw,
            grammar="" if grammar is None else grammar.text,
            bad_words=bad_words_of(request, model.text),
            traceparent=record.traceparent,
            learn_from=learning_source(request, model.config.draft.learning, caller.name or "", caller.learn),
            draft_prompt=self._draft_prompt(request, model),
        )
        head = Head(
            id=f"{self._format.id_prefix}{request.request_id or record.name}",
            created=int(time.time()),
            model=request.model,
            system_fingerprint=model.fingerprint,
        )
        bounded = enumerate(caller.bounded(generations))
        choices = [self._choice(request, model, index, generation) for index, generation in bounded]
        record.response_id = head["id"]
        record.sessions = [generation.session for generation in generations]
        record.prompt_tokens = sum(map(len, prompts))
        record.choices = [choice.text for choice in choices]
        writer = self._format.writer(request, head, model.text)
        source = partial(follow, model.generator, choices, service.metrics.of(record.model), service.clock)
        return ApiAnswer(writer, source, request.stream, request.is_scored, choices, record.prompt_tokens)

    def _draft_prompt(self, request: RequestT, model: ModelService) -> tuple[int, ...]:
        if model.draft_prompts is None or request.truncate_prompt_tokens is not None:
            return ()
        return self._format.draft_prompt(request, model.draft_prompts)

    def _choice(self, request: RequestT, model: ModelService, index: int, generation: Generation) -> Choice:
        codec = model.text
        skips = request.skip_special_tokens and not self._format.needs_special_tokens(codec)
        echoed = generation.prompt if request.is_echoed else ()
        reader = self._format.reader(request, codec, generation.prompt)
        selection = self._format.stream_options(request)
        options = TextOptions(
            stop_ids=frozenset(generation.stop_ids),
            keeps_stop=request.include_stop_str_in_output,
            named_stop_ids=frozenset(request.stop_token_ids) - (set() if request.ignore_eos else set(codec.eos_ids)),
            min_tokens=request.min_tokens,
            echoed=echoed,
            echoed_text=codec.decode(echoed, skips) if echoed else "",
            by_token=bool(request.stop) or selection.trace or not isinstance(reader, PlainReader),
        )
        text = ChoiceText(
            index,
            codec.detokenizer(
                skips,
                request.spaces_between_special_tokens,
                generation.prompt if self._format.continues_prompt(request) else (),
            ),
            StopMatcher(request.stop, request.include_stop_str_in_output),
            self._service.server.stream_interval,
            options,
        )
        stream = ChoiceStream(index, reader, selection, self._service.draw)
        return Choice(generation, text, stream)


@dataclass(frozen=True, slots=True)
class ComputedEndpoint(Generic[PartT]):
    """Endpoint without generation; `work` computes the answer from the body, off the event loop."""

    schema: type[PartT]
    work: Callable[[Tokenizing, PartT], BaseModel]
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with suppress(ClientDisconnect):
            response = await self._respond(request, scope[CALLER])
            response.headers[REQUEST_ID] = request_id_of(request) or self.service.new_request_id()
            await response(scope, receive, send)

    async def _respond(self, request: Request, caller: Caller) -> Response:
        try:
            check_request_id(request)
            with caller.exchange() as exchange:
                exchange.take(1)  # counts against the key's session limit
                async with self.service.bodies.read(request) as body:
                    return as_json(await self.service.in_thread(self._answer, body))
        except Exception as error:  # noqa: BLE001  # every failure becomes an error response
            return failure_of(error).response

    def _answer(self, body: bytes) -> BaseModel:
        request = parse(self.schema, body, self.service.bounds)
        model = self.service.model(request.model)
        return self.work(Tokenizing(model.text, model.config), request)


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """Answer to one request; can be read once, either whole or as events."""

    writer: AnswerWriter
    deltas: Callable[[], AsyncGenerator[list[Delta], None]]  # runs the sessions
    stream: bool
    is_scored: bool
    choices: list[Choice]
    prompt_tokens: int

    async def end(self) -> None:
        """Waits for all choices to end."""
        async with aclosing(self.deltas()) as arrivals:
            async for deltas in arrivals:
                for delta in deltas:
                    self.choices[delta.index].stream.events(delta)

    def whole(self) -> Response:
        """Returns the answer; called after `end`."""
        return as_json(self.writer.whole(self.choices, self._usage()))

    async def events(self) -> AsyncGenerator[str, None]:
        """Yields the answer as server-sent events, joined if ready together; there is none before the first text."""
        async with aclosing(self.deltas()) as arrivals:
            async for deltas in arrivals:
                if text := "".join([sent for delta in deltas for sent in self._sent(delta)]):
                    yield text
        yield "".join(self.writer.closing(self._usage(), metrics_of(self.choices)))

    def _sent(self, delta: Delta) -> Iterator[str]:
        for event in self.choices[delta.index].stream.events(delta):
            yield from self.writer.event(event, self._usage)

    def _usage(self) -> Usage:
        return usage_of(self.choices, self.prompt_tokens)
