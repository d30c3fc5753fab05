"""Tests starting Ray for a local server, with one retry, and joining a cluster with enough capacity."""

import logging
import signal
from typing import Any, NoReturn

import httpx
import pytest
import ray
from ray import serve
from rich.console import Console

from cluster.errors import ConfigError
from serve_app.cli.demo import demo_config
from serve_app.operations import local
from serve_app.operations.deploying import StartError
from serve_app.operations.local import serving


class Started(BaseException):
    """Ends the start once Ray runs; unit tests go no further."""


class FailingRay:
    """Fake `ray.init` that fails `times` times, then starts."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.starts = 0

    def init(self, **_: object) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            raise Exception("The current node timed out during startup.")
        raise Started


def start() -> None:
    with serving(demo_config(["server.port=0"]), Console(quiet=True)):
        raise AssertionError("nothing was started")


def test_a_failed_ray_start_is_retried_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    failing = FailingRay(failures=1)
    monkeypatch.setattr(ray, "init", failing.init)
    with caplog.at_level(logging.WARNING), pytest.raises(Started):
        start()
    assert failing.starts == 2
    assert "timed out during startup" in caplog.text


def test_ray_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingRay(failures=9)
    monkeypatch.setattr(ray, "init", failing.init)
    with pytest.raises(StartError, match=r"Ray did not start on this machine: .* timed out during startup"):
        start()
    assert failing.starts == 2


def test_a_full_cluster_is_refused_before_serve_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would silently wait for the missing nodes."""
    node = {"NodeID": "n", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 0.01}, "Labels": {}, "Alive": True}
    started: list[object] = []
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    monkeypatch.setattr(serve, "start", lambda **_: started.append(serve))
    monkeypatch.setattr(local, "is_running", lambda: False)
    refused = serving(demo_config([]), Console(quiet=True), address="auto")
    with pytest.raises(ConfigError, match="the cluster cannot hold this configuration"), refused:
        raise AssertionError("it was served")
    assert started == []


NODE = {"NodeID": "n", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0}, "Labels": {}, "Alive": True}


class RunningServe:
    """Fake Serve of an existing cluster; `done` lists changes to it and requests."""

    def __init__(self, *applications: str) -> None:
        self.done: list[str] = []
        self._details = {
            "http_options": {"host": "0.0.0.0", "port": 8123},
            "applications": {name: {} for name in applications},
        }

    def details(self) -> dict[str, Any]:
        return self._details

    def get(self, url: str, **_: object) -> NoReturn:
        self.done.append(url)
        raise Started


def joined(monkeypatch: pytest.MonkeyPatch, *applications: str) -> RunningServe:
    """Replaces Ray and Serve by a cluster with `applications`."""
    running = RunningServe(*applications)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [NODE])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve, "start", lambda **_: running.done.append("start"))
    monkeypatch.setattr(httpx, "get", running.get)
    monkeypatch.setattr(local, "is_running", lambda: True)
    monkeypatch.setattr(local, "serve_details", running.details)
    monkeypatch.setattr(local, "deploy", lambda *_, **__: running.done.append("deploy"))
    monkeypatch.setattr(local, "withdraw", lambda _: running.done.append("withdraw"))
    return running


def test_a_running_deployment_is_neither_replaced_nor_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    running = joined(monkeypatch, "slipstream")
    refused = serving(demo_config([]), Console(quiet=True), address="auto")
    with pytest.raises(ConfigError, match=r"already deployed .* `slipstream bench --url URL --rate 1`"), refused:
        raise AssertionError("it was served")
    assert running.done == []


def test_a_running_serve_is_reached_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    running = joined(monkeypatch, "another")
    with pytest.raises(Started), serving(demo_config([]), Console(quiet=True), address="auto"):
        raise AssertionError("it answered")
    assert running.done == ["start", "deploy", "http://127.0.0.1:8123/health", "withdraw"]


def test_any_free_port_is_refused_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    running = joined(monkeypatch)
    refused = serving(demo_config(["server.port=0"]), Console(quiet=True), address="auto")
    with pytest.raises(ConfigError, match=r"server\.port is 0"), refused:
        raise AssertionError("it was served")
    assert running.done == []
