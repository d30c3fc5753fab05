"""Conversion of trace contexts between W3C's text form, used on the wire, and OpenTelemetry."""

from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"

_PROPAGATOR = TraceContextTextMapPropagator()


def context_of(traceparent: str) -> Context:
    """Returns the context to begin a span in; an empty text begins a new trace."""
    return _PROPAGATOR.extract({TRACEPARENT: traceparent}, Context())


def traceparent_of(span: Span) -> str:
    """Returns the traceparent for work below the span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier[TRACEPARENT]
