"""Exponentially weighted estimators."""

import math
import random

import pytest

from cluster.speculation.estimators import Mean, Pairs
from tests.unit.cluster.speculation.samples import a_delay


def test_the_first_measurements_weigh_the_same_and_later_ones_fade():
    mean = Mean()
    for measured in (1.0, 2.0, 6.0):
        mean = mean.after(measured, memory=0.1)
    assert mean.value == pytest.approx(3.0)
    for _ in range(100):
        mean = mean.after(5.0, memory=0.1)
    assert mean.value == pytest.approx(5.0, rel=0.001)
    assert mean.after(6.0, memory=0.1).value == pytest.approx(5.1, rel=0.001)


def test_the_error_of_a_ratio_covers_the_truth_as_often_as_a_standard_error():
    """In about two of three runs, the true ratio is within one standard error."""
    covered = 0
    for seed in range(400):
        drawn = random.Random(seed)
        pairs = Pairs()
        for _ in range(40):
            under = drawn.uniform(1, 3)
            pairs = pairs.after(under, under * 1.2 + drawn.gauss(0, 0.5), memory=0.0)
        covered += abs(pairs.ratio - 1.2) < pairs.ratio_error
    assert 0.6 < covered / 400 < 0.75
    assert (Pairs().ratio, Pairs().ratio_error) == (1.0, 0.0)


def test_a_ratio_follows_recent_measurements_and_keeps_an_error():
    pairs = Pairs()
    for over in [1.0, 2.0] * 500 + [4.0, 5.0] * 500:
        pairs = pairs.after(1.0, over, memory=0.02)
    assert pairs.ratio == pytest.approx(4.5, rel=0.01)
    assert pairs.ratio_error == pytest.approx(0.5 / math.sqrt(50), rel=0.05)


def test_a_line_is_fitted_by_least_squares_and_follows_recent_measurements():
    slower = a_delay([(1, 0.100), (11, 0.110)] * 20)
    assert (slower.base, slower.slope) == (pytest.approx(0.099), pytest.approx(0.001))
    for _ in range(600):
        slower = slower.after(1, 0.2, memory=0.01).after(11, 0.4, memory=0.01)
    assert (slower.base, slower.slope) == (pytest.approx(0.18, rel=0.02), pytest.approx(0.02, rel=0.02))


def test_steps_of_one_size_give_no_slope():
    cost = a_delay([(4, 0.1)] * 5)
    assert (cost.base, cost.slope) == (pytest.approx(0.1), 0.0)
    assert (Pairs().base, Pairs().slope) == (0.0, 0.0)


def test_noise_makes_no_cost_negative():
    cost = a_delay([(1, 0.3), (20, 0.1)])
    assert cost.slope == 0.0
    assert a_delay([(1, 0.001), (20, 1.0)]).base >= 0.0
