"""Pools follow sessions, which Serve itself does not count."""

from dataclasses import dataclass, field

import pytest

from cluster.autoscaling import SessionsPolicy
from cluster.config import Replicas
from cluster.placement import scaling_options


@dataclass
class Reports:
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    target_num_replicas: int = 3


@pytest.mark.parametrize(("sessions", "replicas"), [(0, 1), (1, 1), (10, 1), (11, 2), (95, 10)])
def test_size_follows_sessions(sessions: int, replicas: int) -> None:
    reports = Reports({"sessions": {"a": sessions, "b": 0.0}})
    assert SessionsPolicy(10)(reports)[0] == replicas


def test_sessions_that_wait_count() -> None:
    assert SessionsPolicy(10)(Reports({"sessions": {"a": 10.0}, "queued": {"a": 25.0}}))[0] == 4


def test_silence_changes_nothing() -> None:
    """A controller that has lost its reports must not shrink a busy pool."""
    assert SessionsPolicy(10)(Reports())[0] == 3


def test_serve_takes_the_policy() -> None:
    from ray.serve.config import AutoscalingConfig

    options = scaling_options(Replicas(min=1, max=4, sessions_per_replica=6))["autoscaling_config"]
    policy = AutoscalingConfig(**options).policy.get_policy()(**options["policy"]["policy_kwargs"])
    assert policy(Reports({"sessions": {"a": 13.0}}))[0] == 3
