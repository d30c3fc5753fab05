"""How many replicas a pool should have: a pure policy over what its replicas report.

Serve's controller calls it; delays and bounds are Serve's. gRPC sessions are no Serve requests, so the default
policy would see an idle pool. Knows nothing of Serve's types beyond the one attribute that it reads.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

SESSIONS = ("sessions", "queued")  # what replicas record: sessions held, and sessions that wait for a place


class Observed(Protocol):
    """The part of Serve's AutoscalingContext that is read here."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]]  # by metric name and replica
    target_num_replicas: int


class SessionsPolicy:
    """Keeps a pool at about `sessions_per_replica` sessions a replica."""

    def __init__(self, sessions_per_replica: float) -> None:
        self._sessions_per_replica = sessions_per_replica

    def __call__(self, observed: Observed) -> tuple[int, dict[str, Any]]:
        """The size wanted, and no state. Without any report the size stays."""
        reports = [observed.aggregated_metrics.get(name, {}) for name in SESSIONS]
        if not any(reports):
            return observed.target_num_replicas, {}
        sessions = sum(value for report in reports for value in report.values())
        return max(1, math.ceil(sessions / self._sessions_per_replica)), {}
