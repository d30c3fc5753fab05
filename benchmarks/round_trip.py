"""Measures a round without the models' time: engine and draft return at once, over real gRPC.

    python benchmarks/round_trip.py --sessions 1,16,64 --json round_trip.json
    git worktree add /tmp/older COMMIT && python benchmarks/round_trip.py --rounds 5 --against /tmp/older

A target and a drafter (`round_trip_peer.py`) have one core each and exchange messages on loopback; a router in a third
process opens all sessions at once. Every step waits for the blocks of all sessions, and accepts two of four tokens.

- round: from a step's outcomes to the next step, whose plan contains a block for every session
- verdict to block: in the drafter, from the arrival of the verdicts' first frame to the encoding of the last block
- outcome to plan: the same as a round, without speculation, so that the target waits for nothing

The phases of a round are medians; the clock is common to all processes. `--against` adds another checkout, which
alternates with this one in each round because machine speed drifts.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
PRESENT = "this checkout"
OTHER = "the other"
TARGET_CORE, DRAFTER_CORE = 0, 1
DRAFT_TOKENS = 4
WARM_UP_STEPS = 50  # per load
PHASES = (
    ("apply, encode", "outcome", "TargetToDrafter encoded"),
    ("to the drafter", "TargetToDrafter encoded", "TargetToDrafter received"),
    ("decode, schedule", "TargetToDrafter received", "draft"),
    ("propose, encode", "draft", "DrafterToTarget encoded"),
    ("to the target", "DrafterToTarget encoded", "DrafterToTarget received"),
    ("decode, plan", "DrafterToTarget received", "plan"),
)
ROUND = "round"
DRAFTING = "verdict to block"
PLANNING = "outcome to plan"

Samples = dict[str, list[float]]  # seconds by figure
EventTimes = list[tuple[str, float]]


@dataclass(frozen=True)
class Load:
    """Sessions of one run; all start together and last equally many rounds."""

    sessions: int
    steps: int
    draft_tokens: int


@dataclass(frozen=True)
class Run:
    """A load with its start and end times on the system-wide clock."""

    load: Load
    began_s: float
    ended_s: float


@dataclass
class Peers:
    """Target, drafter and router of one checkout."""

    target: str  # address
    drafter: str
    router: asyncio.subprocess.Process
    runs: list[Run] = field(default_factory=list)

    async def run(self, load: Load) -> None:
        """Runs the load to its end."""
        asked = asdict(load) | {"name": str(len(self.runs)), "target": self.target, "drafter": self.drafter}
        assert self.router.stdin is not None
        self.router.stdin.write(json.dumps(asked).encode() + b"\n")
        began_s, ended_s = json.loads(await _line(self.router))
        self.runs.append(Run(load, began_s, ended_s))


async def _started(checkout: Path, *arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, str(HERE / "round_trip_peer.py"), *arguments)
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 30,
    )


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode().strip()
    if not line:
        raise SystemExit("a peer failed; see its output above")
    return line


async def _events(process: asyncio.subprocess.Process) -> EventTimes:
    """Stops a peer and returns its events."""
    output, _ = await process.communicate(b"")
    return [(name, at_s) for name, at_s in json.loads(output)]


@asynccontextmanager
async def measured(checkout: Path, samples: Mapping[int, Samples]) -> AsyncIterator[Peers]:
    """Runs a checkout's target and drafter; on exit, adds their figures to `samples` by number of sessions."""
    target = await _started(checkout, "target", str(TARGET_CORE))
    drafter = await _started(checkout, "drafter", str(DRAFTER_CORE))
    router = await _started(checkout, "router")
    peers = Peers(await _line(target), await _line(drafter), router)
    yield peers
    await router.communicate(b"")
    at_target, at_drafter = await _events(target), await _events(drafter)
    for run in peers.runs:
        for figures in _figures(run, _within(at_target, run), _within(at_drafter, run)):
            for name, seconds in figures.items():
                samples[run.load.sessions].setdefault(name, []).append(seconds)


def _within(events: EventTimes, run: Run) -> EventTimes:
    first, last = (bisect_left(events, at_s, key=lambda event: event[1]) for at_s in (run.began_s, run.ended_s))
    return events[first:last]


def _figures(run: Run, at_target: EventTimes, at_drafter: EventTimes) -> Iterator[dict[str, float]]:
    """Returns the figures of each round in which every session took part."""
    sessions = run.load.sessions
    drafted = sessions if run.load.draft_tokens else 0
    for began, ended in list(_rounds(at_target, sessions, drafted))[WARM_UP_STEPS:]:
        took_s = ended[1] - began[1]
        if not drafted:
            yield {PLANNING: took_s}
            continue
        first, last = (bisect_left(at_drafter, at_s, key=lambda event: event[1]) for at_s in (began[1], ended[1]))
        there = at_drafter[first:last]
        inside = at_target[at_target.index(began) : at_target.index(ended)]
        times = {"outcome": began[1], "plan": ended[1]}
        times |= dict(event for event in inside if event[0].endswith(("encoded", "received")))  # the last of each
        times |= dict(reversed([event for event in there if not event[0].endswith("encoded")]))  # the first of each
        times |= dict(event for event in there if event[0].endswith("encoded"))
        figures = {ROUND: took_s}
        if {"TargetToDrafter received", "DrafterToTarget encoded"} <= times.keys():
            figures[DRAFTING] = times["DrafterToTarget encoded"] - times["TargetToDrafter received"]
        figures |= {name: times[end] - times[start] for name, start, end in PHASES if {start, end} <= times.keys()}
        yield figures


def _rounds(
    at_target: EventTimes, sessions: int, drafted: int
) -> Iterator[tuple[tuple[str, float], tuple[str, float]]]:
    """Returns the events that begin and end each round."""
    began = None
    for event in at_target:
        if event[0].startswith("outcome"):
            began = event if event[0] == f"outcome {sessions}" else None
        elif event[0].startswith("plan"):
            if began is not None and event[0] == f"plan {sessions} {drafted}":
                yield began, event
            began = None


async def measure(
    checkouts: Mapping[str, Path], counts: Sequence[int], steps: int, rounds: int
) -> dict[str, dict[int, Samples]]:
    """Returns the samples by checkout and sessions; every other round runs the checkouts in reverse order."""
    samples: dict[str, dict[int, Samples]] = {name: {count: {} for count in counts} for name in checkouts}
    for number in range(rounds):
        for name in checkouts if number % 2 == 0 else reversed(checkouts):
            async with measured(checkouts[name], samples[name]) as peers:
                for count in counts:
                    await peers.run(Load(count, steps + WARM_UP_STEPS, DRAFT_TOKENS))
                    await peers.run(Load(count, steps + WARM_UP_STEPS, 0))
    return samples


def quantiles(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the 99th percentile."""
    return statistics.median(samples), statistics.quantiles(samples, n=100)[98]


def figures_table(samples: Mapping[str, Mapping[int, Samples]]) -> Table:
    """Formats p50 and p99 by checkout and sessions."""
    table = Table("sessions", "", *(f"{name}, ms" for name in (ROUND, DRAFTING, PLANNING)), title="p50, p99")
    for count in next(iter(samples.values())):
        for name, by_count in samples.items():
            cells = [_cell(by_count[count].get(figure, [])) for figure in (ROUND, DRAFTING, PLANNING)]
            table.add_row(str(count), name, *cells)
    return table


def _cell(samples: Sequence[float]) -> str:
    return ", ".join(f"{1e3 * value:.2f}" for value in quantiles(samples)) if len(samples) > 1 else "-"


def phases_table(samples: Mapping[str, Mapping[int, Samples]]) -> Table:
    """Formats the medians of a round's phases."""
    table = Table("sessions", "", *(name for name, _, _ in PHASES), title="phases of a round, medians in us")
    for count in next(iter(samples.values())):
        for name, by_count in samples.items():
            phases = [by_count[count].get(phase, []) for phase, _, _ in PHASES]
            table.add_row(str(count), name, *(f"{1e6 * statistics.median(one):.0f}" if one else "-" for one in phases))
    return table


def as_json(samples: Mapping[str, Mapping[int, Samples]]) -> dict[str, Any]:
    """Returns the figures by checkout and sessions."""
    return {
        name: {
            str(count): {figure: _summary(one) for figure, one in by_figure.items() if len(one) > 1}
            for count, by_figure in by_count.items()
        }
        for name, by_count in samples.items()
    }


def _summary(samples: Sequence[float]) -> dict[str, float]:
    p50, p99 = quantiles(samples)
    p10 = statistics.quantiles(samples, n=10)[0]  # estimates the time on a quiet machine
    return {"rounds": len(samples), "p10_ms": 1e3 * p10, "p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measures the time of a round beside the models.")
    parser.add_argument("--sessions", default="1,16,64", help="numbers of sessions, separated by commas")
    parser.add_argument("--steps", type=int, default=400, help="measured steps per run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of this project to measure")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    checkouts = {PRESENT: HERE.parent} | ({OTHER: options.against.resolve()} if options.against else {})
    counts = [int(count) for count in options.sessions.split(",")]
    samples = asyncio.run(measure(checkouts, counts, options.steps, options.rounds))
    console = Console()
    console.print(figures_table(samples))
    console.print(phases_table(samples))
    if options.json is not None:
        options.json.write_text(json.dumps({"steps": options.steps, "figures": as_json(samples)}, indent=1))


if __name__ == "__main__":
    main()
