"""Tests the closed formulas: known values, limits, and mutual agreement."""

import random

import pytest

from tools.planning.estimates import (
    RoundCosts,
    break_even_draft_s,
    expected_tokens,
    expected_tokens_by_position,
    in_process,
    lock_step,
    speed_up,
)

COSTS = RoundCosts(non_speculative_s=0.020, verify_s=0.022, draft_s=0.010, hop_s=0.001)


@pytest.mark.parametrize(
    ("acceptance", "draft_tokens", "tokens"),
    [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 1, 1.5), (0.8, 3, 2.952), (0.9, 7, 5.6953279), (0.7, 0, 1.0)],
)
def test_expected_tokens(acceptance, draft_tokens, tokens):
    assert expected_tokens(acceptance, draft_tokens) == pytest.approx(tokens)


def test_expected_tokens_equals_the_simulated_mean():
    rng = random.Random(3)

    def verified() -> int:
        for accepted in range(5):
            if rng.random() >= 0.7:
                return accepted + 1
        return 6

    mean = sum(verified() for _ in range(20_000)) / 20_000
    assert mean == pytest.approx(expected_tokens(0.7, 5), rel=0.02)


def test_acceptance_by_position_with_one_value_is_the_geometric_case():
    assert expected_tokens_by_position([0.6] * 4) == pytest.approx(expected_tokens(0.6, 4))
    assert expected_tokens_by_position([0.9, 0.5, 0.0, 0.9]) == pytest.approx(1 + 0.9 + 0.45)


def test_round_times():
    assert lock_step(COSTS) == pytest.approx(0.034)
    assert in_process(COSTS) == pytest.approx(0.032)


def test_speed_up():
    assert speed_up(3.4, 0.034, 0.020) == pytest.approx(2.0)


def test_the_gain_vanishes_at_the_break_even_draft_time():
    draft_s = break_even_draft_s(3.0, COSTS)
    there = RoundCosts(COSTS.non_speculative_s, COSTS.verify_s, draft_s, COSTS.hop_s)
    assert lock_step(there) == pytest.approx(3.0 * COSTS.non_speculative_s, abs=1e-6)


def test_no_break_even_if_verification_costs_the_gain():
    assert break_even_draft_s(1.5, RoundCosts(0.010, 0.016, 0.001)) == 0.0
