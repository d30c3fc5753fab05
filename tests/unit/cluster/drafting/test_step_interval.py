"""Tests estimates of the next verdict's time."""

import random

import pytest

from cluster.drafting.session_table import StepIntervalEstimate


def test_the_interval_is_unknown_before_the_first_step():
    assert StepIntervalEstimate().earliest_s is None
    assert StepIntervalEstimate().after(0.03).earliest_s == 0.03


def test_the_estimate_is_a_low_quantile_of_the_intervals():
    drawn = random.Random(0)
    cadence = StepIntervalEstimate()
    earlier = 0
    for _ in range(1000):
        step_s = drawn.gauss(0.030, 0.004)
        earlier += cadence.earliest_s is not None and step_s < cadence.earliest_s
        cadence = cadence.after(step_s)
    assert cadence.mean_s == pytest.approx(0.030, rel=0.1)
    assert earlier < 250


def test_the_estimate_follows_a_slower_target():
    cadence = StepIntervalEstimate().after(0.03)
    for _ in range(40):
        cadence = cadence.after(0.06)
    assert cadence.earliest_s == pytest.approx(0.06, rel=0.05)
