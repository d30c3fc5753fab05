"""Client-side latencies at common quantiles. Pure.

TTFT: from the request to the first text. TPOT: seconds per token after that, averaged within each answer. ITL: between
two events of a stream that brought text, over all answers; with speculation an event may bring several tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from serve_app.endpoint_client import TimedAnswer


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Quantiles | None":
        """Returns the quantiles; None for no values."""
        found = list(seconds)
        return cls(*map(float, np.quantile(found, [0.5, 0.9, 0.99]))) if found else None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of some answers; None for a measure for which no answer was long enough."""

    ttft: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None

    @classmethod
    def of(cls, answers: Sequence[TimedAnswer]) -> "Latencies":
        return cls(
            ttft=Quantiles.of(answer.first_token_s for answer in answers),
            tpot=Quantiles.of(
                (answer.latency_s - answer.first_token_s) / (answer.tokens - 1)
                for answer in answers
                if answer.tokens > 1
            ),
            itl=Quantiles.of(gap for answer in answers for gap in answer.gaps_s),
        )


MEASURES = tuple(field.name for field in fields(Latencies))
QUANTILES = tuple(field.name for field in fields(Quantiles))


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One arm under one load."""

    arm: str
    load: float  # requests per second, or concurrent requests
    tokens_per_s: float
    answers: int
    failed: int
    latencies: Latencies

    def quantile_s(self, measure: str, quantile: str) -> float | None:
        """Returns one quantile in seconds, such as "ttft" at "p99"."""
        found: Quantiles | None = getattr(self.latencies, measure)
        return None if found is None else float(getattr(found, quantile))
