"""Starting Ray for a server of one's own: a start that fails is tried once more, then told in a sentence."""

import logging

import pytest
import ray
from rich.console import Console

from serve_app.cli.demo_models import demo_config
from serve_app.operations.local import StartError, serving


class Started(BaseException):
    """Ends the start where Ray is up, which no unit test goes beyond."""


class FailingRay:
    """`ray.init` that fails so many times, then starts."""

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


def test_a_failed_start_of_ray_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailingRay(failures=1)
    monkeypatch.setattr(ray, "init", failing.init)
    with caplog.at_level(logging.WARNING), pytest.raises(Started):
        start()
    assert failing.starts == 2
    assert "timed out during startup" in caplog.text


def test_ray_that_does_not_start_at_all_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingRay(failures=9)
    monkeypatch.setattr(ray, "init", failing.init)
    with pytest.raises(StartError, match=r"Ray did not start on this machine: .* timed out during startup"):
        start()
    assert failing.starts == 2
