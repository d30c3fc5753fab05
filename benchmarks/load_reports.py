"""Reads the numbers of answered and failed requests from load generators' reports.

Load generators exit with status 0 even if every request fails, so the status alone proves nothing.
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
    """Reads a report of `bench serve --save-result`; counts incomplete requests as failed."""
    data = json.loads(report.read_text())
    return [Requests(report.stem, data["completed"], data["num_prompts"] - data["completed"])]


def of_guidellm(report: Path) -> list[Requests]:
    """Reads a GuideLLM report; ignores requests that GuideLLM cancelled at its request limit."""
    totals = [one["metrics"]["request_totals"] for one in json.loads(report.read_text())["benchmarks"]]
    return [Requests(f"{report.stem} {at}", one["successful"], one["errored"]) for at, one in enumerate(totals)]


def of_aiperf(folder: Path) -> list[Requests]:
    """Reads AIPerf's reports, one per concurrency; AIPerf omits counts of 0."""
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
        return f"its reports contain {len(found)} runs, expected {runs}"
    bad = [one for one in found if one.failed or one.answered < least]
    if bad:
        return "; ".join(f"{one.run}: {one.failed} failed, {one.answered} of {least} were answered" for one in bad)
    return None
