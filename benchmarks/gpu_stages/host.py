"""Stage E: the host's part of a round, without models, by `host_cost.py` and `round_trip.py`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import host_cost
import round_trip

from gpu_stages.results import OUT_OF_TIME, Emit, Result, Setting, Unmeasured

SESSIONS = (1, 16, 64, 256)
STEPS = 200
TINY_SESSIONS = (1, 4)
TINY_STEPS = 10
SECONDS_OF_ROUND_TRIPS = 60.0


@dataclass(frozen=True)
class HostPart(Result):
    """Median of one part of the coordinator's step, without network; see `host_cost.py`."""

    sessions: int
    part: str
    ms: float


@dataclass(frozen=True)
class RoundFigure(Result):
    """A duration within rounds over gRPC, with an engine and a draft that take no time; see `round_trip.py`."""

    sessions: int
    figure: str
    rounds: int
    p50_ms: float
    p99_ms: float


def run(setting: Setting, emit: Emit) -> None:
    bookkeeping(setting, emit)
    round_trips(setting, emit)


def bookkeeping(setting: Setting, emit: Emit) -> None:
    """Measures the coordinator's work without a network."""
    for count in TINY_SESSIONS if setting.is_tiny else SESSIONS:
        parts = host_cost.measured(count, TINY_STEPS if setting.is_tiny else STEPS)
        for part, ms in parts.items():
            emit(HostPart(count, part, ms))


def round_trips(setting: Setting, emit: Emit) -> None:
    """Measures rounds of target, drafter and router processes."""
    if not setting.has_time(0 if setting.is_tiny else SECONDS_OF_ROUND_TRIPS):
        emit(Unmeasured("rounds over gRPC", OUT_OF_TIME))
        return
    counts = TINY_SESSIONS if setting.is_tiny else SESSIONS
    checkouts = {round_trip.PRESENT: round_trip.HERE.parent}
    measured = asyncio.run(round_trip.measure(checkouts, counts, TINY_STEPS if setting.is_tiny else STEPS, rounds=1))
    for count, by_figure in round_trip.as_json(measured)[round_trip.PRESENT].items():
        for figure, times in by_figure.items():
            emit(RoundFigure(int(count), figure, times["rounds"], times["p50_ms"], times["p99_ms"]))


def summary(results: Sequence[Result]) -> str:
    shown = (round_trip.PLANNING, round_trip.DRAFTING)
    figures = [one for one in results if isinstance(one, RoundFigure) and one.figure in shown]
    most = max((one.sessions for one in figures), default=0)
    return "; ".join(
        f"{one.figure} {one.p50_ms:.2f} ms, p99 {one.p99_ms:.2f}, {most} sessions"
        for one in figures
        if one.sessions == most
    )
