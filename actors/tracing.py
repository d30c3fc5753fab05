"""OpenTelemetry spans of traced sessions in one process.

`ServiceTracing` is the entry point; its tracers do nothing unless tracing is configured. `SessionSpans` records one
span per session, as a child of the router's span; slow spans list their rounds as events. `TracedService` exports spans
through one provider per service, since traces distinguish services by provider.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.config_sections import TracingConfig
from cluster.errors import ConfigError
from cluster.tracing import MAX_EVENTS, Fact, SessionEvents
from protos.messages import Close, Finish, Message, Open, Refusal, Verdict

TRACEPARENT = "traceparent"
NO_TRACER = NoOpTracer()

_PROPAGATOR = TraceContextTextMapPropagator()


def context_of(traceparent: str) -> Context:
    """Returns the context in which to start a span; an empty `traceparent` starts a new trace."""
    return _PROPAGATOR.extract({TRACEPARENT: traceparent}, Context())


def traceparent_of(span: Span) -> str:
    """Returns the traceparent for child spans of `span`."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier[TRACEPARENT]


MAX_SESSIONS = 4096  # maximum number of concurrently traced sessions; further ones are not traced
NANO = 1_000_000_000


@dataclass(slots=True)
class _TracedSession:
    span: Span
    by: str  # peer that opened the session
    began_ns: int
    events: SessionEvents = field(default_factory=SessionEvents)


class SessionSpans:
    """Records the spans of traced sessions in one process. `name` describes the process's work on a session."""

    def __init__(
        self, tracer: Tracer, name: str, kind: SpanKind, slow_s: float, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._kind = kind
        self._slow_ns = slow_s * NANO
        self._clock_ns = clock_ns
        self._sessions: dict[str, _TracedSession] = {}

    def opened(self, session: str, traceparent: str, by: str = "", **facts: Fact) -> str:
        """Starts a span for a session opened by peer `by`; returns the traceparent to pass on, empty if not traced."""
        now = self._clock_ns()
        if (spans := self._sessions.get(session)) is not None:
            spans.by = by
            spans.events.add(now, "opened again", facts)
            return traceparent_of(spans.span)
        if not traceparent or len(self._sessions) >= MAX_SESSIONS:
            return ""
        attributes = {"slipstream.session": session, **_named(facts)}
        span = self._tracer.start_span(self._name, context_of(traceparent), self._kind, attributes, start_time=now)
        if not span.is_recording():
            return ""
        self._sessions[session] = _TracedSession(span, by, now)
        return traceparent_of(span)

    def on_received(self, peer: str, message: Message) -> None:
        match message:
            case Open():
                facts = {"attempt": message.attempt, "tokens": len(message.tokens)}
                self.opened(message.session, message.traceparent, peer, **facts)
            case Close():
                self.ended(message.session, "closed")
            case _:
                self._note(message)

    def on_sent(self, peer: str, message: Message) -> None:
        """Records a message sent to a peer."""
        traced = self._sessions.get(getattr(message, "session", ""))
        if traced is None or (isinstance(message, Verdict) and peer != traced.by):
            return  # a target sends its router's verdicts to drafters too
        self._note(message)
        if isinstance(message, Refusal) and peer == traced.by:
            self.ended(message.session, "refused")

    def marked(self, name: str, sessions: Iterable[str], **facts: Fact) -> None:
        """Records an event in the span of each session."""
        if self._sessions:
            for session in sessions:
                if (traced := self._sessions.get(session)) is not None:
                    traced.events.add(self._clock_ns(), name, facts)

    def ended(self, session: str, why: str) -> None:
        """Ends a session's span."""
        if (traced := self._sessions.pop(session, None)) is None:
            return
        now = self._clock_ns()
        span = traced.span
        span.set_attribute("slipstream.end", why)
        span.set_attributes({f"slipstream.{name}": count for name, count in traced.events.sums.items()})
        if now - traced.began_ns >= self._slow_ns:
            span.set_attribute("slipstream.events_left_out", traced.events.left_out)
            for event in traced.events.latest:
                span.add_event(event.name, _named(event.facts), event.at_ns)
        span.end(now)

    def gone(self, peer: str) -> None:
        """Ends all spans of a peer whose stream broke."""
        for session in [name for name, traced in self._sessions.items() if traced.by == peer]:
            self.ended(session, "stream broke")

    def _note(self, message: Message) -> None:
        session = getattr(message, "session", "")
        if (traced := self._sessions.get(session)) is None:
            return
        traced.events.message(self._clock_ns(), message)
        if isinstance(message, Verdict) and message.finish is not Finish.NONE:
            self.ended(session, message.finish.name.lower())


NO_TRACING = SessionSpans(NO_TRACER, "", SpanKind.SERVER, 0.0)


def _named(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Adds the prefix `slipstream.` to the facts' names."""
    return {f"slipstream.{name}": value for name, value in facts.items()}


EXPORT_PERIOD_MS = 1000  # if the process dies, spans not yet exported are lost


@dataclass(frozen=True, slots=True)
class TracedService:
    """Spans of one service, exported by a separate thread."""

    tracer: Tracer
    provider: TracerProvider
    slow_s: float

    @classmethod
    def begun(cls, options: TracingConfig, service: str, exporter: SpanExporter | None = None) -> "TracedService":
        """Starts tracing for a service. Raises ConfigError if the exporter is not installed."""
        provider = TracerProvider(
            ParentBasedTraceIdRatio(options.sample),
            Resource.create({"service.name": f"slipstream-{service}", "service.namespace": "slipstream"}),
            span_limits=SpanLimits(max_events=MAX_EVENTS),
        )
        sender = exporter or _otlp_exporter(options)
        provider.add_span_processor(BatchSpanProcessor(sender, schedule_delay_millis=EXPORT_PERIOD_MS))
        return cls(provider.get_tracer("slipstream"), provider, options.slow_s)

    def sessions(self, name: str, kind: SpanKind = SpanKind.SERVER) -> SessionSpans:
        """Returns a recorder of session spans; `name` describes the service's work on a session."""
        return SessionSpans(self.tracer, name, kind, self.slow_s)

    def close(self) -> None:
        """Exports the remaining spans."""
        self.provider.shutdown()


class ServiceTracing:
    """One service's tracing in this process."""

    def __init__(self, options: TracingConfig, service: str) -> None:
        """Starts tracing if configured. Raises ConfigError if the exporter is not installed."""
        self.service = TracedService.begun(options, service) if options.is_on else None

    @property
    def tracer(self) -> Tracer:
        return NO_TRACER if self.service is None else self.service.tracer

    def sessions(self, work: str) -> SessionSpans:
        """Returns a recorder of session spans; `work` describes the service's work on a session."""
        return NO_TRACING if self.service is None else self.service.sessions(work)

    def close(self) -> None:
        """Exports the remaining spans; may take a while."""
        if self.service is not None:
            self.service.close()


def _otlp_exporter(options: TracingConfig) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        missing = f"tracing.endpoint is set, but the span exporter is not installed: {error}"
        raise ConfigError(f"{missing}; pip install 'slipstream-serving[tracing]'") from error
    return OTLPSpanExporter(endpoint=options.endpoint)
