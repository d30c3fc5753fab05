"""Tests disconnecting from a Ray cluster, and errors from replicas that do not answer."""

import logging
from types import SimpleNamespace
from typing import NoReturn

import pytest
import ray
from ray import serve

from serve_app.operations import ray_cluster
from serve_app.operations.ray_cluster import ClusterError, recordings


class Client:
    """Fake Serve client that records calls."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def shutdown_cached_handles(self) -> None:
        self._done.append("handles")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("ray"))
    return done


def test_handles_are_closed_before_ray(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ray's shutdown, the threads of open handles would start a new cluster."""
    monkeypatch.setattr(ray_cluster, "_get_global_client", lambda raise_if_no_controller_running: Client(done))
    ray_cluster.disconnect()
    assert done == ["handles", "ray"]


def test_a_connection_silences_the_logs_of_serve(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's handles log lines at level INFO between the tables of `slipstream status`."""
    monkeypatch.setattr(ray_cluster, "check_reachable", lambda address: None)
    monkeypatch.setattr(ray, "init", lambda **options: done.append("init"))
    monkeypatch.setattr(ray_cluster, "disconnect", lambda: done.append("disconnect"))
    monkeypatch.setattr(logging.getLogger("ray.serve"), "level", logging.INFO)
    with ray_cluster.connected("auto"):
        assert logging.getLogger("ray.serve").level == logging.ERROR
    assert done == ["init", "disconnect"]


def test_a_cluster_without_serve_is_disconnected(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_get_global_client", lambda raise_if_no_controller_running: None)
    ray_cluster.disconnect()
    assert done == ["ray"]


def test_serve_is_not_queried_without_a_cluster(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A query would start a cluster."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster, "_get_global_client", pytest.fail)
    ray_cluster.disconnect()
    assert done == ["ray"]


def test_recordings_of_an_absent_deployment_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    with pytest.raises(ClusterError, match=r"no slipstream is deployed .*; deploy it with `slipstream up`"):
        recordings("slipstream")


class SlowHandle:
    """Fake handle to a deployment whose replicas do not answer in time."""

    def broadcast(self, method: str) -> "SlowHandle":
        return self

    def results(self, timeout_s: float) -> NoReturn:
        raise TimeoutError


def test_recordings_of_a_slow_replica_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    running = SimpleNamespace(deployments={"Target": None})
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"slipstream": running}))
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: SlowHandle())
    with pytest.raises(ClusterError, match=r"slipstream did not answer within 20 s; try again"):
        recordings("slipstream")
