"""Tests reports of audit differences."""

import json
import logging
from pathlib import Path

import pytest

from cluster.audit import Difference
from cluster.errors import ConfigError
from protos.messages import Acceptance, Sampling
from serve_app.audit_alarm import AuditAlarm

DIFFERENCE = Difference(
    session="abc",
    prompt_len=3,
    position=7,
    margin=2.5,
    committed=(11, 12),
    plain=(50, 51),
    sampling=Sampling(temperature=0.5),
    seed=2**63 + 1,
    choice=0,
    acceptance=Acceptance.COUPLED,
    draft_tokens=4,
    adapter="",
    served_by=("10.0.0.1:1",),
    audited_by="10.0.0.2:2",
)


def test_the_log_names_session_position_and_targets(caplog: pytest.LogCaptureFixture) -> None:
    AuditAlarm(None, 1000)(DIFFERENCE)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    for part in ("abc", "token 7", "2.5", "10.0.0.1:1", "10.0.0.2:2"):
        assert part in record.getMessage()


def test_a_record_contains_both_continuations_and_the_parameters(tmp_path: Path) -> None:
    path = tmp_path / "differences.jsonl"
    alarm = AuditAlarm(str(path), 10_000, clock=lambda: 12.0)
    alarm(DIFFERENCE)
    alarm(DIFFERENCE)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == second
    assert (first["time"], first["position"], first["margin"], first["seed"]) == (12.0, 7, 2.5, 2**63 + 1)
    assert (first["committed"], first["plain"], first["acceptance"]) == ([11, 12], [50, 51], "coupled")
    assert first["sampling"]["temperature"] == 0.5


def test_the_file_size_is_limited_and_the_limit_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "differences.jsonl"
    alarm = AuditAlarm(str(path), 1000)
    for _ in range(9):
        alarm(DIFFERENCE)
    assert 0 < path.stat().st_size <= 1000
    assert all(json.loads(line) for line in path.read_text().splitlines()), "no line is cut"
    assert "full" in caplog.text


def test_an_unwritable_path_is_refused_at_startup(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server.audit.records is .*nowhere.*expected a file"):
        AuditAlarm(str(tmp_path / "nowhere" / "x.jsonl"), 1000)


def test_a_path_that_becomes_unwritable_does_not_end_the_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    alarm = AuditAlarm(str(folder / "x.jsonl"), 1000)
    (folder / "x.jsonl").unlink()
    folder.rmdir()
    alarm(DIFFERENCE)
    assert "could not be written" in caplog.text
