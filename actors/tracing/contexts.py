"""Trace contexts as they travel, in W3C's text form, and as OpenTelemetry has them."""

from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"

_PROPAGATOR = TraceContextTextMapPropagator()


def context_of(traceparent: str) -> Context:
    """The context to begin a span in; one that begins a trace of its own where the text is none."""
    return _PROPAGATOR.extract({TRACEPARENT: traceparent}, Context())


def traceparent_of(span: Span) -> str:
    """Of what is done below the span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier[TRACEPARENT]
