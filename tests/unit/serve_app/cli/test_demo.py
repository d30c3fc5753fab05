"""Tests the demo's output."""

from io import StringIO

from rich.console import Console

from serve_app.cli.demo import DemoRow, show_pieces, worksheet
from serve_app.endpoint_client import Tally, TimedAnswer


def answer(text: str, seconds: float) -> TimedAnswer:
    return TimedAnswer(text, tokens=12, accepted=6, rejected=2, first_token_s=0.1, latency_s=seconds)


def printed(terminal: bool) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None)
    show_pieces([("The", False), (" sky", True), (" is", True), ("[b]", False)], console)
    return out.getvalue()


def test_drafted_text_is_marked_without_colors() -> None:
    assert printed(terminal=False) == "The‹ sky is›[b]"


def test_drafted_text_is_colored_on_a_terminal() -> None:
    assert printed(terminal=True) == "The\x1b[1;4;32m sky is\x1b[0m[b]"


def test_the_worksheet_sums_its_prompts() -> None:
    tally = Tally(tokens=12, drafted=8, accepted=6, verifies=6, blocks=4)
    rows = [
        DemoRow("chat", tally, answer("same", 1), answer("same", 2)),
        DemoRow("code", tally, answer("one", 3), answer("other", 4)),
    ]
    table = worksheet(rows)
    cells = {
        str(name): list(column.cells) for name, column in zip(["", "chat", "code", "all"], table.columns, strict=True)
    }
    total = dict(zip(cells[""], cells["all"], strict=True))
    assert total == {
        "verifies": "12",
        "of them with a block": "8",
        "drafted tokens": "16",
        "accepted": "12",
        "rejected": "4",
        "acceptance rate": "0.75",
        "acceptance length": "2.50",
        "tokens/s with speculation": "6.0",
        "tokens/s without": "4.0",
        "speed-up": "1.50x",
        "answers that are equal": "1 of 2",
    }
