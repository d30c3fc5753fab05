"""Restrictions of unit tests, and the hypothesis profile."""

import socket
import time
from typing import NoReturn

import grpc
import pytest
import ray
from hypothesis import settings

# Deterministic examples, no deadlines on a busy machine, and no database of earlier failures.
settings.register_profile("unit", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _no_ray_no_sleep_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails unit tests that use Ray, sleep or sockets; such tests belong to `integration`."""

    def forbidden(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a unit test may not start Ray, sleep or connect")

    monkeypatch.setattr(ray, "init", forbidden)
    monkeypatch.setattr(time, "sleep", forbidden)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket.socket, "connect_ex", forbidden)
    monkeypatch.setattr(grpc.aio, "insecure_channel", forbidden)
    monkeypatch.setattr(grpc.aio, "server", forbidden)
