"""What deployments make of the configuration."""

import pytest

from cluster.config import SpeculationConfig
from cluster.pacing.policy import Adaptive, LockStep, Pacing
from serve_app.deployments import pacing_of


@pytest.mark.parametrize(
    ("speculation", "policy"),
    [
        (SpeculationConfig(), Adaptive),
        (SpeculationConfig(pacing="adaptive"), Adaptive),
        (SpeculationConfig(pacing="lock_step"), LockStep),
    ],
    ids=["default", "adaptive", "lock_step"],
)
def test_the_pacing_is_the_one_that_is_named(speculation: SpeculationConfig, policy: type[Pacing]) -> None:
    assert type(pacing_of(speculation)) is policy
