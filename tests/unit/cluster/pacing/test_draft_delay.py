"""How long blocks take to come."""

import pytest

from cluster.pacing.draft_delay import DraftDelay
from tests.unit.cluster.pacing.pacing_samples import a_delay


def test_costs_are_found_by_least_squares_and_follow_the_machine():
    slower = a_delay([(1, 0.100), (11, 0.110)] * 20)
    assert (slower.base_s, slower.token_s) == (pytest.approx(0.099), pytest.approx(0.001))
    for _ in range(600):
        slower = slower.after(1, 0.2).after(11, 0.4)
    assert (slower.base_s, slower.token_s) == (pytest.approx(0.18, rel=0.02), pytest.approx(0.02, rel=0.02))


def test_steps_of_one_size_say_nothing_of_a_tokens_cost():
    cost = a_delay([(4, 0.1)] * 5)
    assert (cost.base_s, cost.token_s) == (pytest.approx(0.1), 0.0)
    assert (DraftDelay().base_s, DraftDelay().token_s) == (0.0, 0.0)


def test_a_noisy_machine_makes_no_cost_negative():
    cost = a_delay([(1, 0.3), (20, 0.1)])
    assert cost.token_s == 0.0
    assert a_delay([(1, 0.001), (20, 1.0)]).base_s >= 0.0
