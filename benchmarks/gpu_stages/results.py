"""Settings and results of all stages, their JSON, and their tables."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json
from rich.table import Table

RUNNING, DONE, CUT, FAILED, SKIPPED = "running", "done", "cut", "failed", "skipped"
OUT_OF_TIME = "out of time"


@dataclass(frozen=True)
class Setting:
    """Device and time of one stage."""

    device: torch.device
    is_tiny: bool
    ends_s: float = float("inf")  # on the monotonic clock; a stage stops before

    def has_time(self, seconds: float = 0.0) -> bool:
        """Returns whether a measurement of this duration fits."""
        return time.monotonic() + seconds < self.ends_s


@dataclass(frozen=True)
class Result:
    """Base of all results."""


@dataclass(frozen=True)
class Unmeasured(Result):
    """A measurement that was not made."""

    what: str
    why: str


Emit = Callable[[Result], None]
"""Stores a result."""


@dataclass(frozen=True)
class StageReport:
    """Outcome of one stage; `results` contains everything measured before it ended."""

    letter: str
    title: str
    state: str  # RUNNING, DONE, CUT at its time limit, FAILED or SKIPPED
    seconds: float
    summary: str
    why: str = ""  # if it is cut, failed or skipped
    traceback: str = ""
    results: tuple[Result, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the report with its results grouped by type."""
        by_type = {kind.__name__: [asdict(one) for one in some] for kind, some in grouped(self.results).items()}
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "results"}
        return {**own, "results": by_type}


def grouped(results: Iterable[Result]) -> dict[type[Result], list[Result]]:
    """Groups results by type, in order of first occurrence."""
    groups: defaultdict[type[Result], list[Result]] = defaultdict(list)
    for result in results:
        groups[type(result)].append(result)
    return dict(groups)


def write(path: Path, facts: Mapping[str, Any], reports: Sequence[StageReport]) -> None:
    """Replaces the file in one operation, so that it is complete at all times. NaN becomes null."""
    data = {**facts, "stages": {report.letter: report.as_json() for report in reports}}
    beside = path.with_suffix(f"{path.suffix}.new")
    beside.write_bytes(to_json(data, indent=1, inf_nan_mode="null") + b"\n")
    os.replace(beside, path)


def tables(results: Iterable[Result]) -> list[Table]:
    """Formats results as one table per type, with a column per field."""
    found = []
    for kind, some in grouped(results).items():
        names = [field.name for field in fields(kind)]
        table = Table(*[name.replace("_", " ") for name in names], title=kind.__name__)
        for result in some:
            table.add_row(*[_cell(getattr(result, name)) for name in names])
        found.append(table)
    return found


def summary_table(reports: Iterable[StageReport]) -> Table:
    table = Table("stage", "state", "s", "result", title="Summary")
    for report in reports:
        lines = [line for line in (report.summary, report.why) if line]
        table.add_row(f"{report.letter} {report.title}", report.state, f"{report.seconds:.0f}", "; ".join(lines))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
