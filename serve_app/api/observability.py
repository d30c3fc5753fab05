"""Request logs, traces, and counters by prompt version.

A `RequestRecord` is filled during a request and read at its end. Prompt and answer texts are never recorded. Spans
follow OpenTelemetry's conventions for generative AI.

Acceptance by prompt version:

    sum by (prompt_version) (rate(slipstream_prompt_version_tokens_total{kind="accepted"}[1h]))
      / sum by (prompt_version) (rate(slipstream_prompt_version_tokens_total{kind="drafted"}[1h]))

Mean time to the first token by version:

    sum by (prompt_version) (rate(slipstream_prompt_version_seconds_total{until="first token"}[1h]))
      / sum by (prompt_version) (rate(slipstream_prompt_version_choices_total[1h]))
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.tracing import TRACEPARENT, context_of, traceparent_of
from serve_app.api.replies import FinishReason
from serve_app.api.request_schemas import GenerationRequest

CLIENT_LEFT = 499
"""Status of requests whose client disconnected before the end of the answer."""


class ChoiceRecord(Protocol):
    """Progress of one choice of a request."""

    tokens: int
    accepted: int
    rejected: int
    finish: FinishReason | None
    first_token_s: float | None  # seconds since the session's start
    last_token_s: float | None


@dataclass
class RequestRecord:
    """Progress and result of one request."""

    status: int = CLIENT_LEFT
    traceparent: str = ""  # trace context to pass on; empty if not traced
    model: str = ""  # main name of the requested model; empty until it is known
    request: GenerationRequest | None = None  # set once the body is parsed
    name: str = ""  # request id, sent in a response header
    response_id: str = ""  # empty until the request is accepted
    sessions: Sequence[str] = ()
    prompt_tokens: int = 0
    choices: Sequence[ChoiceRecord] = ()


log = logging.getLogger(__name__)


@contextmanager
def logged(endpoint: str, record: RequestRecord, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Logs the request when the block ends. Logs of other processes contain the same `sessions` ids."""
    began = clock()
    try:
        yield
    finally:
        if log.isEnabledFor(logging.INFO):
            choices = record.choices
            fields: dict[str, object] = {
                "request": record.response_id or record.name,
                "endpoint": endpoint,
                "status": record.status,
                "seconds": round(clock() - began, 6),
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": sum(choice.tokens for choice in choices),
                "accepted_tokens": sum(choice.accepted for choice in choices),
                "rejected_tokens": sum(choice.rejected for choice in choices),
                "sessions": " ".join(record.sessions),
            }
            if record.request is not None and record.request.prompt_version is not None:
                fields["prompt_version"] = record.request.prompt_version
            log.info("request ended: %s", _as_log_text(fields), extra=fields)


def _as_log_text(fields: Mapping[str, object]) -> str:
    """Formats fields for text logs, which omit extra fields."""
    return " ".join(f"{name}={str(value).replace(' ', ',')}" for name, value in fields.items())


OPERATIONS: Mapping[str, str] = {"chat": "chat", "completions": "text_completion", "responses": "chat"}
"""OpenTelemetry GenAI operation name by endpoint."""

PROVIDER = "slipstream"

Attribute = str | int | float | bool | list[str]


class RequestSpans:
    """Traces requests from their records."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def request(self, endpoint: str, path: str, headers: Mapping[str, str], record: RequestRecord) -> Iterator[None]:
        """Opens the request's span; sets the record's `traceparent` if the trace is sampled."""
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
    """Sets the span's attributes when the request has ended."""
    span.set_attribute("http.response.status_code", record.status)
    if record.request is not None:
        span.update_name(f"{operation} {record.request.model}")
        span.set_attributes(_request_attributes(record.request))
    if record.choices:
        span.set_attributes(_answer_attributes(record))
    if record.status >= 500 or record.status == CLIENT_LEFT:
        span.set_attribute("error.type", str(record.status))
        span.set_status(Status(StatusCode.ERROR))


def _request_attributes(request: GenerationRequest) -> dict[str, Attribute]:
    attributes: dict[str, Attribute | None] = {
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
        "slipstream.draft_tokens": request.speculation.draft_tokens,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _answer_attributes(record: RequestRecord) -> dict[str, Attribute]:
    choices = record.choices
    firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
    attributes: dict[str, Attribute] = {
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.finish_reasons": [choice.finish or "error" for choice in choices],
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(choice.tokens for choice in choices),
        "slipstream.accepted_tokens": sum(choice.accepted for choice in choices),
        "slipstream.rejected_tokens": sum(choice.rejected for choice in choices),
    }
    if record.request is not None:
        attributes["gen_ai.response.model"] = record.request.model
    if firsts:
        attributes["gen_ai.response.time_to_first_chunk"] = min(firsts)
    return attributes


MAX_VERSIONS = 32  # versions that one router counts separately; each adds about ten series
OTHER_VERSION = "other"
"""Label of all versions beyond the limit."""

VERSION = "prompt_version"


class PromptVersions(Collector):
    """Totals by prompt version since the router's start."""

    def __init__(self, most: int = MAX_VERSIONS) -> None:
        self._most = most
        self._requests: Counter[str] = Counter()
        self._choices: Counter[str] = Counter()  # choices with at least one token, by version
        self._tokens: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def ended(self, record: RequestRecord, seconds: float) -> None:
        """Counts a valid request that took `seconds`."""
        request = record.request
        if request is None or request.prompt_version is None:
            return
        name = request.prompt_version
        version = name if name in self._requests or len(self._requests) < self._most else OTHER_VERSION
        self._requests[version] += 1
        tokens = self._tokens[version]
        tokens["prompt"] += record.prompt_tokens
        for choice in record.choices:
            tokens["completion"] += choice.tokens
            tokens["drafted"] += choice.accepted + choice.rejected
            tokens["accepted"] += choice.accepted
            if choice.first_token_s is not None:
                self._choices[version] += 1
                self._seconds[version]["first token"] += choice.first_token_s
        self._seconds[version]["end"] += seconds

    def collect(self) -> Iterator[Metric]:
        """Exports copies of the totals, since scrapes run in another thread."""
        prefix = "slipstream_prompt_version"
        requests = CounterMetricFamily(f"{prefix}_requests", "Requests that have ended", labels=(VERSION,))
        choices = CounterMetricFamily(f"{prefix}_choices", "Choices with at least one token", labels=(VERSION,))
        tokens = CounterMetricFamily(f"{prefix}_tokens", "Tokens, by kind", labels=(VERSION, "kind"))
        seconds = CounterMetricFamily(
            f"{prefix}_seconds", "Time until the first token or the end of the answer", labels=(VERSION, "until")
        )
        for version, count in dict(self._requests).items():
            requests.add_metric((version,), count)
            choices.add_metric((version,), self._choices[version])
            for kind, sum_of in dict(self._tokens[version]).items():
                tokens.add_metric((version, kind), sum_of)
            for end_s, sum_of_s in dict(self._seconds[version]).items():
                seconds.add_metric((version, end_s), sum_of_s)
        yield from (requests, choices, tokens, seconds)
