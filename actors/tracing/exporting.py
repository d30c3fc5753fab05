"""Export of spans. Each service of a process has its own provider, because traces distinguish services by provider."""

from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, Tracer

from actors.tracing.session_spans import SessionSpans
from cluster.errors import ConfigError
from cluster.tracing.options import TracingConfig
from cluster.tracing.round_events import MOST_EVENTS

EXPORT_PERIOD_MS = 1000  # ended spans that are not exported yet are lost if the process dies


@dataclass(frozen=True, slots=True)
class TracedService:
    """Spans of one service, exported by a thread of their own."""

    tracer: Tracer
    provider: TracerProvider
    slow_s: float

    @classmethod
    def begun(cls, options: TracingConfig, service: str, exporter: SpanExporter | None = None) -> "TracedService":
        """Starts tracing for a service. Raises ConfigError if the exporter is not installed."""
        provider = TracerProvider(
            ParentBasedTraceIdRatio(options.sample),
            Resource.create({"service.name": f"slipstream-{service}", "service.namespace": "slipstream"}),
            span_limits=SpanLimits(max_events=MOST_EVENTS),
        )
        sender = exporter or _otlp_exporter(options)
        provider.add_span_processor(BatchSpanProcessor(sender, schedule_delay_millis=EXPORT_PERIOD_MS))
        return cls(provider.get_tracer("slipstream"), provider, options.slow_s)

    def sessions(self, name: str, kind: SpanKind = SpanKind.SERVER) -> SessionSpans:
        """Returns a tracer for the service's work on sessions."""
        return SessionSpans(self.tracer, name, kind, self.slow_s)

    def close(self) -> None:
        """Exports the remaining spans."""
        self.provider.shutdown()


def _otlp_exporter(options: TracingConfig) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        missing = f"tracing.endpoint is set, and what sends spans is not installed: {error}"
        raise ConfigError(f"{missing}; pip install 'slipstream-serving[tracing]'") from error
    return OTLPSpanExporter(endpoint=options.endpoint)
