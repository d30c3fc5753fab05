"""Reports of replicas, from which the sizes of their pools are decided."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar


@dataclass(frozen=True)
class TargetReport:
    """Report of one target replica. Counts are current; shares and times cover the time since the previous report."""

    running: float = 0.0  # sessions in the cache
    queued: float = 0.0  # sessions that wait for a place in it
    drafted: float = 0.0  # running sessions with a drafter that is asked for tokens
    undrafted: float = 0.0  # running sessions that want drafts but have no drafter
    waiting: float = 0.0  # share of the time with sessions that was spent in no step, usually waiting for blocks
    cache: float = 0.0  # share of the pages that sessions hold
    unread: float = 0.0  # sessions that have yet to get their first token
    first_token_s: float = 0.0  # mean time to the first token; sessions without one count with their time so far
    backlog_s: float = 0.0  # estimated time to compute the prompts of `unread`
    gain: float = 1.0  # throughput over that of non-speculative decoding; 1: none, or unknown


@dataclass(frozen=True)
class DraftReport:
    """Report of one drafter on the time since its previous report."""

    shared: float = 0.0  # share of the time in requested passes, beyond what a single session would take
    late: float = 0.0  # share of the requested blocks that were late


Report = TypeVar("Report", TargetReport, DraftReport)


def reported(kind: type[Report], metrics: Mapping[str, Mapping[Any, float]]) -> list[Report]:
    """Builds reports from metrics by name and replica, for the replicas that have reported all of theirs."""
    names = [field.name for field in fields(kind)]
    return [kind(**{name: metrics[name][replica] for name in names}) for replica in tellers(names, metrics)]


def tellers(names: Iterable[str], metrics: Mapping[str, Mapping[Any, float]]) -> list[Any]:
    """Returns the replicas that have reported all of these names, in a stable order."""
    told = [metrics.get(name, {}) for name in names]
    return sorted(set.intersection(*(set(values) for values in told)), key=str)


class Growth:
    """Growth of counters between calls."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def of(self, **counters: float) -> dict[str, float]:
        """Returns how much each counter has grown since the previous call, or since 0 at the first call."""
        grown = {name: value - self._before.get(name, 0.0) for name, value in counters.items()}
        self._before = counters
        return grown


def share(part: float, whole: float) -> float:
    """Returns `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole > 0 else 0.0
