"""Server for the client tests; it runs in Slipstream's environment, not in the clients'."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    python = os.environ.get("SLIPSTREAM_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    command = [python, "-m", "tests.clients.obedient_model"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()
