"""Estimates of the next verdict's time."""

import random

import pytest

from cluster.drafting.session_table import StepIntervalEstimate


def test_nothing_is_known_before_the_first_step():
    assert StepIntervalEstimate().earliest_s is None
    assert StepIntervalEstimate().after(0.03).earliest_s == 0.03


def test_most_steps_take_longer_than_what_they_hardly_ever_take_less_than():
    drawn = random.Random(0)
    cadence = StepIntervalEstimate()
    earlier = 0
    for _ in range(1000):
        step_s = drawn.gauss(0.030, 0.004)
        earlier += cadence.earliest_s is not None and step_s < cadence.earliest_s
        cadence = cadence.after(step_s)
    assert cadence.mean_s == pytest.approx(0.030, rel=0.1)
    assert earlier < 250


def test_it_follows_a_target_that_becomes_slower():
    cadence = StepIntervalEstimate().after(0.03)
    for _ in range(40):
        cadence = cadence.after(0.06)
    assert cadence.earliest_s == pytest.approx(0.06, rel=0.05)
