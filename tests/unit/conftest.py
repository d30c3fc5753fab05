"""Restrictions of unit tests, and hypothesis' profile."""

import socket
import time
from typing import NoReturn

import grpc
import pytest
import ray
from hypothesis import settings

# The same examples on every run, no deadline on a busy machine, and no folder of earlier failures.
settings.register_profile("unit", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _no_ray_no_sleep_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit test needs no cluster, no waiting and no peer; one that does belongs to `integration`."""

    def forbidden(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a unit test may not start Ray, sleep or connect")

    monkeypatch.setattr(ray, "init", forbidden)
    monkeypatch.setattr(time, "sleep", forbidden)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket.socket, "connect_ex", forbidden)
    monkeypatch.setattr(grpc.aio, "insecure_channel", forbidden)
    monkeypatch.setattr(grpc.aio, "server", forbidden)
