"""Tracing of one service as configured. If it is off, OpenTelemetry is not even imported."""

from typing import TYPE_CHECKING

from cluster.tracing.options import TracingConfig
from cluster.tracing.session_tracer import NoTracing, SessionTracer

if TYPE_CHECKING:
    from actors.tracing.exporting import TracedService


class ServiceTracing:
    """Tracing of one service in this process."""

    def __init__(self, options: TracingConfig, service: str) -> None:
        """Raises ConfigError if tracing is on and the exporter is not installed."""
        self.service = _begun(options, service) if options.is_on else None

    def sessions(self, work: str) -> SessionTracer:
        """Returns the session tracer; `work` names what the service does for a session."""
        return NoTracing() if self.service is None else self.service.sessions(work)

    def close(self) -> None:
        """Exports the remaining spans; may take a while."""
        if self.service is not None:
            self.service.close()


def _begun(options: TracingConfig, service: str) -> "TracedService":
    from actors.tracing.exporting import TracedService

    return TracedService.begun(options, service)
