"""Tests the progress of long commands on terminals and in redirected output."""

import io

import pytest
from rich.console import Console

from tools.progress import log_phase, progress


@pytest.mark.parametrize(
    ("total", "expected"), [(3, [1, 2, 3]), (40, [1, *range(2, 41, 2)]), (68, [1, *range(4, 69, 4)])]
)
def test_redirected_output_gets_some_lines_on_stderr(total: int, expected: list[int], capsys):
    with progress(Console(), "Batches", total) as advance:
        for _ in range(total):
            advance()
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"Batches: {done} of {total}" for done in expected]
    assert captured.out == "", "results only"


def test_a_redirected_command_logs_its_phases(capsys):
    log_phase(Console(), "Warming up [once]")
    assert capsys.readouterr() == ("", "Warming up [once]\n")


def test_a_terminal_shows_a_bar_only(capsys):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    log_phase(terminal, "Warming up")
    with progress(terminal, "Batches", 2) as advance:
        advance()
    assert "1/2" in terminal.file.getvalue()
    assert capsys.readouterr() == ("", "")
