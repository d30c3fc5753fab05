"""OpenTelemetry span collector on loopback, for OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """Received spans by service."""

    spans: dict[str, list[Any]] = field(default_factory=dict)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans.setdefault(names["service.name"], []).extend(scope.spans)

    def only(self, service: str) -> Any:
        (span,) = self.spans[f"slipstream-{service}"]
        return span


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """Runs a collector; yields it with its endpoint."""
    collector = Collector()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
