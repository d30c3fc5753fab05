"""Tests reading failed requests from load generators' abridged reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.benchmarks.scripts import script

reports = script("load_reports")
Requests = reports.Requests


def written(path: Path, data: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def test_vllm_counts_completed_requests(tmp_path: Path) -> None:
    report = written(tmp_path / "vllm-chat-4.json", {"num_prompts": 8, "completed": 5})
    assert reports.of_vllm(report) == [Requests("vllm-chat-4", 5, 3)]


def test_guidellm_gives_up_requests_that_are_no_failures(tmp_path: Path) -> None:
    totals = [{"successful": 8, "errored": 0, "incomplete": 3, "total": 11}, {"successful": 7, "errored": 1}]
    report = written(tmp_path / "guidellm.json", {"benchmarks": [{"metrics": {"request_totals": t}} for t in totals]})
    assert reports.of_guidellm(report) == [Requests("guidellm 0", 8, 0), Requests("guidellm 1", 7, 1)]


def test_aiperf_leaves_out_counts_that_are_0(tmp_path: Path) -> None:
    name = "profile_export_aiperf.json"
    good = {"request_count": {"unit": "requests", "avg": 8.0}, "error_request_count": None}
    written(tmp_path / "aiperf" / "concurrency_1" / name, good)
    written(tmp_path / "aiperf" / "concurrency_4" / name, {"error_request_count": {"unit": "requests", "avg": 8.0}})
    expected = [Requests("aiperf/concurrency_1", 8, 0), Requests("aiperf/concurrency_4", 0, 8)]
    assert reports.of_aiperf(tmp_path / "aiperf") == expected


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ([Requests("a", 8, 0), Requests("b", 9, 0)], None),
        ([Requests("a", 8, 0)], "its reports contain 1 runs, expected 2"),
        ([Requests("a", 8, 0), Requests("b", 8, 1)], "b: 1 failed, 8 of 8 were answered"),
        ([Requests("a", 7, 0), Requests("b", 8, 0)], "a: 0 failed, 7 of 8 were answered"),
    ],
)
def test_a_failed_request_and_a_missing_answer_are_faults(found: list[Any], wrong: str | None) -> None:
    assert reports.fault(found, least=8, runs=2) == wrong
