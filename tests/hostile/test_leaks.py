"""Nothing remains of hostile clients that have left: no session, task, connection or body.

Not part of the default suite: `make test-hostile`. The models are toys, so the router and the API are under test.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.hostile.toy_server import MODEL, ToyServer, toy_server

SECONDS = "8"
PATIENCE_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[ToyServer]:
    with toy_server(max_requests=64, body_timeout_s=3) as server:
        yield server


def attack(server: ToyServer, kind: str) -> None:
    command = [sys.executable, "-m", "tests.hostile.attack", kind, server.url, MODEL, SECONDS]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.1)


@pytest.mark.parametrize("kind", ["leaving", "slow_readers", "trickling", "bodies"])
def test_attacks_leave_nothing_behind(server: ToyServer, kind: str) -> None:
    attack(server, "bodies")  # what is made once is made now
    eventually(lambda: server.connections == 0, "nobody is connected")
    eventually(lambda: server.requests == 0, "no request runs")
    tasks = server.tasks
    attack(server, kind)
    eventually(lambda: server.connections == 0, "nobody is connected")
    eventually(lambda: server.requests == 0, "no request runs")
    eventually(lambda: server.tasks <= tasks, f"there are no more tasks than {tasks}")
