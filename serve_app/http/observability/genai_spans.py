"""Spans of HTTP requests by OpenTelemetry's conventions for generative AI: parameters, usage and end; never a text."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from actors.tracing.contexts import TRACEPARENT, context_of, traceparent_of
from serve_app.http.observability.records import CLIENT_LEFT, RequestRecord
from serve_app.http.wire.schemas import GenerationRequest

OPERATIONS: Mapping[str, str] = {"chat": "chat", "completions": "text_completion", "responses": "chat"}
"""GenAI's name of what each endpoint does."""

PROVIDER = "slipstream"

Attribute = str | int | float | bool | list[str]


class GenAiSpans:
    """Implements `RequestSpans`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def request(self, endpoint: str, path: str, headers: Mapping[str, str], record: RequestRecord) -> Iterator[None]:
        operation = OPERATIONS[endpoint]
        given = headers.get(TRACEPARENT)
        context = context_of(given) if given is not None else Context()
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "http.request.method": "POST",
            "http.route": path,
            "url.path": path,
        }
        span = self._tracer.start_span(operation, context, SpanKind.SERVER, attributes)
        if span.is_recording():
            record.traceparent = traceparent_of(span)
        try:
            yield
        finally:
            if span.is_recording():
                _describe(span, operation, record)
            span.end()


def _describe(span: Span, operation: str, record: RequestRecord) -> None:
    """All that is known of the request when it is over."""
    span.set_attribute("http.response.status_code", record.status)
    if record.request is not None:
        span.update_name(f"{operation} {record.request.model}")
        span.set_attributes(_asked(record.request))
    if record.choices:
        span.set_attributes(_answered(record))
    if record.status >= 500 or record.status == CLIENT_LEFT:
        span.set_attribute("error.type", str(record.status))
        span.set_status(Status(StatusCode.ERROR))


def _asked(request: GenerationRequest) -> dict[str, Attribute]:
    found: dict[str, Attribute | None] = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k or None,
        "gen_ai.request.frequency_penalty": request.frequency_penalty or None,
        "gen_ai.request.presence_penalty": request.presence_penalty or None,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.choice.count": request.n if request.n > 1 else None,
        "gen_ai.request.max_tokens": min(request.token_limits.values(), default=None),
        "gen_ai.request.stream": request.stream,
        "slipstream.prompt_version": request.prompt_version,
        "slipstream.max_draft_tokens": request.speculation.max_draft_tokens,
    }
    return {name: value for name, value in found.items() if value is not None}


def _answered(record: RequestRecord) -> dict[str, Attribute]:
    choices = record.choices
    firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
    found: dict[str, Attribute] = {
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.finish_reasons": [choice.finish or "error" for choice in choices],
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(choice.tokens for choice in choices),
        "slipstream.accepted_tokens": sum(choice.accepted for choice in choices),
        "slipstream.rejected_tokens": sum(choice.rejected for choice in choices),
    }
    if record.request is not None:
        found["gen_ai.response.model"] = record.request.model
    if firsts:
        found["gen_ai.response.time_to_first_chunk"] = min(firsts)
    return found
