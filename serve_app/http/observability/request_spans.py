"""What the API tells whoever traces requests. Without tracing it tells it to nobody."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from actors.tracing.service import ServiceTracing
from serve_app.http.observability.records import RequestRecord


class RequestSpans(Protocol):
    """Traces requests, by what they say of themselves and by what becomes of them."""

    def request(
        self, endpoint: str, path: str, headers: Mapping[str, str], record: RequestRecord
    ) -> AbstractContextManager[None]:
        """Lasts as long as the request, and sets the record's `traceparent` where the request is traced."""
        ...


class NoRequestSpans:
    """Nothing is traced."""

    def request(
        self, endpoint: str, path: str, headers: Mapping[str, str], record: RequestRecord
    ) -> AbstractContextManager[None]:
        return nullcontext()


def request_spans(tracing: ServiceTracing) -> RequestSpans:
    """Whoever is told of requests, as configured."""
    if tracing.service is None:
        return NoRequestSpans()
    from serve_app.http.observability.genai_spans import GenAiSpans

    return GenAiSpans(tracing.service.tracer)
