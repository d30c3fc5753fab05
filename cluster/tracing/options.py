"""Tracing settings of a deployment: where spans are sent, for which share of requests, and which in detail."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class TracingConfig(BaseModel):
    """OpenTelemetry spans of requests, from HTTP through router, drafter and target; off without an `endpoint`.

    Needs the extra `tracing`: `pip install '.[tracing]'`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = Field(
        None, description="where spans are sent by OTLP over HTTP, as http://collector:4318/v1/traces; default: nowhere"
    )
    sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the requests that is traced, of those without a traceparent, whose own flag decides",
    )
    slow_s: float = Field(
        1.0,
        ge=0,
        description="how long a traced session must take for its spans to tell of each round; 0: all do",
    )

    @property
    def is_on(self) -> bool:
        return self.endpoint is not None
