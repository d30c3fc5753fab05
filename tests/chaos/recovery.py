"""Computes the cost of failures: stalls of streams, and times until pools are complete again. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

NOTICED_S = 15.0  # time limit for Serve to notice an abandoned replica
LOST_NOTICED_S = 120.0  # time limit to notice a lost replica: Ray takes half a minute, or more with few cores
ON_ITS_WAY_S = 2.0  # time during which streams may deliver tokens decided before a failure


@dataclass(frozen=True)
class Failure:
    """Injected failure."""

    kind: str
    at_s: float
    pools: tuple[str, ...] = ()  # deployments that may lose replicas
    struck: str = ""  # description for reports
    stopped_s: float | None = None  # seconds of suspension; None: the processes are lost

    @property
    def noticed_by_s(self) -> float:
        """Returns the time by which all affected peers have noticed."""
        return self.at_s + (LOST_NOTICED_S if self.stopped_s is None else self.stopped_s + NOTICED_S)


@dataclass(frozen=True)
class Stream:
    """Start time of a request, and arrival times of its chunks."""

    began_s: float
    came_s: Sequence[float]


@dataclass(frozen=True)
class Sizes:
    """Number of running replicas by deployment at one time."""

    at_s: float
    running: Mapping[str, int]


def stall_s(failure: Failure, streams: Sequence[Stream]) -> float:
    """Returns the longest stall of a stream that began at the failure or soon after.

    Tokens in transit at the failure still arrive.
    """
    return max([pause for stream in streams for pause in _pauses(stream, failure.at_s)], default=0.0)


def _pauses(stream: Stream, at_s: float) -> Iterator[float]:
    for began_s, ended_s in pairwise([stream.began_s, *stream.came_s]):
        if ended_s > at_s and began_s <= at_s + ON_ITS_WAY_S:
            yield ended_s - max(began_s, at_s)


def whole_s(failure: Failure, sizes: Sequence[Sizes], wanted: Mapping[str, int]) -> float | None:
    """Returns the seconds until the affected pools were complete again; None if they lost nothing or are incomplete."""
    lacking = False
    for one in sizes:
        if one.at_s <= failure.at_s:
            continue
        lacks = _lacks(failure, one, wanted)
        if lacking and not lacks:
            return one.at_s - failure.at_s
        if not lacking and one.at_s > failure.noticed_by_s:
            return None
        lacking = lacking or lacks
    return None


def is_open(failure: Failure, sizes: Sequence[Sizes], wanted: Mapping[str, int], now_s: float) -> bool:
    """Returns whether the pools lack a replica, or may still have to notice its loss."""
    if not failure.pools or whole_s(failure, sizes, wanted) is not None:
        return False
    after = [one for one in sizes if failure.at_s < one.at_s <= failure.noticed_by_s]
    return now_s <= failure.noticed_by_s or any(_lacks(failure, one, wanted) for one in after)


def _lacks(failure: Failure, one: Sizes, wanted: Mapping[str, int]) -> bool:
    return any(one.running.get(pool, 0) < wanted[pool] for pool in failure.pools)


def table(
    failures: Sequence[Failure], streams: Sequence[Stream], sizes: Sequence[Sizes], wanted: Mapping[str, int]
) -> list[str]:
    """Formats results by kind of failure, as Markdown."""
    lines = [
        "| failure | times | longest pause of a stream, s | until the pool is whole, s |",
        "|---|---|---|---|",
    ]
    for kind in sorted({failure.kind for failure in failures}):
        alike = [failure for failure in failures if failure.kind == kind]
        pauses = [stall_s(failure, streams) for failure in alike]
        repairs = [took for failure in alike if (took := whole_s(failure, sizes, wanted)) is not None]
        lines.append(f"| {kind} | {len(alike)} | {_spread(pauses)} | {_spread(repairs)} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f} (most {max(values):.1f})" if values else "-"
