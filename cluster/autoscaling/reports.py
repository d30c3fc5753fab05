"""What replicas report of themselves, for the size of their pools to be decided by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar


@dataclass(frozen=True)
class TargetReport:
    """Of one target replica. Counts are of this moment, shares and times of the time since the report before."""

    running: float = 0.0  # sessions in the cache
    queued: float = 0.0  # sessions that wait for a place in it
    drafted: float = 0.0  # running sessions whose drafters are asked for tokens
    undrafted: float = 0.0  # running sessions that would be asked for, but nobody drafts for them
    waiting: float = 0.0  # share of the time with sessions that passed in no step, for want of blocks as a rule
    cache: float = 0.0  # share of the pages that sessions hold
    unread: float = 0.0  # sessions that have yet to get their first token
    first_token_s: float = 0.0  # mean time to the first token; those that have none yet count with their time so far
    backlog_s: float = 0.0  # that the prompts of those will take
    gain: float = 1.0  # tokens a second over those of plain decoding; 1: nothing, or not known


@dataclass(frozen=True)
class DraftReport:
    """Of one drafter, of the time since the report before."""

    shared: float = 0.0  # share of the time in passes that were asked for, beyond what one session alone takes
    late: float = 0.0  # share of the blocks asked for that came too late


Report = TypeVar("Report", TargetReport, DraftReport)


def reported(kind: type[Report], metrics: Mapping[str, Mapping[Any, float]]) -> list[Report]:
    """The reports in values by name and replica, of the replicas that have told all of theirs."""
    names = [field.name for field in fields(kind)]
    return [kind(**{name: metrics[name][replica] for name in names}) for replica in tellers(names, metrics)]


def tellers(names: Iterable[str], metrics: Mapping[str, Mapping[Any, float]]) -> list[Any]:
    """The replicas that have told all of these, in an order that lasts."""
    told = [metrics.get(name, {}) for name in names]
    return sorted(set.intersection(*(set(values) for values in told)), key=str)


class Growth:
    """By how much counters have grown since they were last asked for."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def of(self, **counters: float) -> dict[str, float]:
        """The first time, since they were 0."""
        grown = {name: value - self._before.get(name, 0.0) for name, value in counters.items()}
        self._before = counters
        return grown


def share(part: float, whole: float) -> float:
    """0 where there is no whole."""
    return part / whole if whole > 0 else 0.0
