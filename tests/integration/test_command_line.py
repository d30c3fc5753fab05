"""Runs `slipstream chat`, `bench --url` and `status --watch` against a real server with a scripted generator."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.routing.ledger import Ended
from protos.messages import Finish
from serve_app.status import watch
from tests.integration.scripted_front import Front, scripted_front
from tests.scripted_generator import STALL
from tools.cli import app


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with scripted_front() as front:
        front.plays([front.emit("abX", accepted=2, rejected="c"), front.emit("Y"), Ended(Finish.STOP)])
        yield front


def test_a_conversation_marks_drafted_text_and_keeps_its_history(front: Front) -> None:
    front.doorkeeper.key = "secret"
    said = CliRunner().invoke(
        app, ["chat", "--url", front.url, "--api-key", "secret"], input="Hello\nAnd now?\n/new\nAnew\n/bye\n"
    )
    front.doorkeeper.key = None
    assert said.exit_code == 0, said.output
    assert said.output.count("‹a›‹b›XY") == 0, "pieces of one run are marked together"
    assert said.output.count("‹ab›XY") == 3
    assert said.output.count("2 of 4 tokens drafted and accepted, 1 rejected") == 3
    prompts = [front.codec.detokenizer().preview(one.prompt) for one in front.generator.generations[-3:]]
    assert prompts == [
        "user:Hello;assistant:",
        "user:Hello;assistant:abXY;user:And now?;assistant:",
        "user:Anew;assistant:",
    ]


def heed_interrupts() -> None:
    """Restores the default handling of interrupts, which shells disable for background processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_only_the_answer(front: Front) -> None:
    scripts = front.generator.scripts
    front.plays([front.emit("begun"), STALL])
    command = [sys.executable, "-c", "from tools.cli import main; main()", "chat", "--url", front.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    ) as program:
        assert program.stdout is not None
        program.stdin.write("Hello\n")
        program.stdin.flush()
        said = ""
        while "begun" not in said:
            said += program.stdout.read(1)
        program.send_signal(signal.SIGINT)
        front.plays([front.emit("again"), Ended(Finish.STOP)])
        said, _ = program.communicate("Hello?\n/bye\n", timeout=60)
    front.generator.scripts = scripts
    assert program.returncode == 0
    assert "[stopped]" in said
    assert "again" in said
    prompt = front.codec.detokenizer().preview(front.generator.generations[-1].prompt)
    assert prompt == "user:Hello;assistant:begun;user:Hello?;assistant:", "what had come stays said"


def test_a_failure_ends_only_the_answer(front: Front) -> None:
    said = CliRunner().invoke(app, ["chat", "--url", front.url, "--max-tokens", "5000"], input="Hello\nAgain\n/bye\n")
    assert said.exit_code == 0
    assert said.output.count("max_tokens is 5000") == 2


def test_rates_are_measured_at_a_running_endpoint(front: Front, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    html = tmp_path / "report.html"
    data = tmp_path / "report.json"
    arguments = ["bench", "--url", front.url, "--rate", "200", "--rate", "400", "--requests", "6"]
    done = CliRunner().invoke(app, [*arguments, "--dataset", str(prompts), "--html", str(html), "--json", str(data)])
    assert done.exit_code == 0, done.output
    report = json.loads(data.read_text())
    assert [(point["arm"], point["load"]) for point in report["points"]] == [
        ("speculative", 200),
        ("plain", 200),
        ("plain", 400),
        ("speculative", 400),
    ]
    assert all(point["answers"] == 6 and point["failed"] == 0 for point in report["points"])
    assert 0 < report["points"][0]["latencies"]["ttft"]["p50"] <= report["points"][0]["latencies"]["ttft"]["p99"]
    assert html.read_text().count("<svg") >= 3


async def test_watching_refreshes_the_output(front: Front) -> None:
    shown = StringIO()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4):
            await watch(front.url, None, Console(file=shown, width=120))
    assert "50%" in shown.getvalue(), "a rate needs a second look"
