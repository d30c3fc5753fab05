"""Reads the reports of load generators: how many requests were answered, and how many failed.

A load generator whose requests all fail ends with status 0, and so its status alone shows nothing.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

AIPERF_REPORT = "profile_export_aiperf.json"


@dataclass(frozen=True, slots=True)
class Requests:
    """Request counts of one run at one concurrency."""

    run: str
    answered: int
    failed: int


def of_vllm(report: Path) -> list[Requests]:
    """`bench serve --save-result`: what was not completed has failed."""
    data = json.loads(report.read_text())
    return [Requests(report.stem, data["completed"], data["num_prompts"] - data["completed"])]


def of_guidellm(report: Path) -> list[Requests]:
    """Incomplete requests are those that it gave up itself once it had enough."""
    totals = [one["metrics"]["request_totals"] for one in json.loads(report.read_text())["benchmarks"]]
    return [Requests(f"{report.stem} {at}", one["successful"], one["errored"]) for at, one in enumerate(totals)]


def of_aiperf(folder: Path) -> list[Requests]:
    """A report for each number of requests at once; counts that are 0 are left out."""
    reports = sorted(folder.rglob(AIPERF_REPORT))
    return [_of_aiperf(str(report.parent.relative_to(folder.parent)), report) for report in reports]


def _of_aiperf(run: str, report: Path) -> Requests:
    data = json.loads(report.read_text())

    def count(name: str) -> int:
        return int((data.get(name) or {}).get("avg") or 0)

    return Requests(run, count("request_count"), count("error_request_count"))


def fault(found: Iterable[Requests], least: int, runs: int) -> str | None:
    """Returns the first fault in a load generator's runs, or None. `runs` is the expected number."""
    found = list(found)
    if len(found) != runs:
        return f"its reports tell of {len(found)} runs, expected {runs}"
    bad = [one for one in found if one.failed or one.answered < least]
    if bad:
        return "; ".join(f"{one.run}: {one.failed} failed, {one.answered} of {least} were answered" for one in bad)
    return None
