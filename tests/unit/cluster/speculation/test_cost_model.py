"""The cost model of steps takes its shape from a profile and its scale from live steps."""

import pytest

from cluster.costs import ForwardCost
from cluster.speculation.estimators import StepCost

SHAPE = ForwardCost(by_tokens=((1, 0.020), (8, 0.026), (16, 0.040)), per_row_s=0.001)


def test_the_profile_holds_until_steps_are_measured():
    cost = StepCost(SHAPE)
    assert cost.non_speculative_s(1) == pytest.approx(0.021)
    assert cost.drafts_s(2, 8) == pytest.approx(0.028)
    assert StepCost().non_speculative_s(4) == 0.0, "nothing is measured"


def test_speculative_and_other_steps_are_scaled_separately():
    """Drafters run in parallel with speculative steps and slow them down."""
    cost = StepCost(SHAPE)
    for _ in range(100):
        cost.with_drafts(1, 4, 1.5 * SHAPE.seconds(1, 4))
        cost.non_speculative(1, 1.2 * SHAPE.seconds(1, 1))
    assert cost.non_speculative_s(1) == pytest.approx(1.2 * SHAPE.seconds(1, 1))
    assert cost.drafts_s(1, 8) == pytest.approx(1.5 * SHAPE.seconds(1, 8))


def test_the_non_speculative_estimate_follows_the_pace_of_speculative_steps():
    """A machine that slowed down after the last non-speculative step reveals nothing about speculation."""
    cost = StepCost(SHAPE)
    for slower in (1.0, 1.3):
        for _ in range(200):
            cost.with_drafts(1, 4, slower * SHAPE.seconds(1, 4))
        assert cost.non_speculative_s(1) == pytest.approx(slower * SHAPE.seconds(1, 1), rel=0.001)
        cost.non_speculative(1, slower * SHAPE.seconds(1, 1))


def test_the_speculative_estimate_follows_the_pace_of_many_non_speculative_steps():
    cost = StepCost(SHAPE)
    for _ in range(100):
        cost.with_drafts(1, 4, SHAPE.seconds(1, 4))
    for _ in range(50):
        cost.non_speculative(1, 0.8 * SHAPE.seconds(1, 1))
    for _ in range(200):
        cost.non_speculative(1, 1.2 * SHAPE.seconds(1, 1))
    assert cost.non_speculative_s(1) == pytest.approx(1.2 * SHAPE.seconds(1, 1), rel=0.001)
    assert cost.drafts_s(1, 4) == pytest.approx(1.2 / 0.8 * SHAPE.seconds(1, 4), rel=0.001)


def test_the_ratio_of_both_kinds_of_steps_holds_for_any_number_of_rows():
    """A measurement at one load is the best guess at another, until non-speculative steps are measured there."""
    cost = StepCost(SHAPE)
    cost.with_drafts(1, 4, SHAPE.seconds(1, 4))
    cost.non_speculative(8, 1.1 * SHAPE.seconds(8, 8))
    for rows in (1, 8, 40):
        assert cost.non_speculative_s(rows) == pytest.approx(1.1 * SHAPE.seconds(rows, rows))


def test_one_step_that_hung_has_little_effect():
    cost = StepCost(SHAPE)
    for _ in range(100):
        cost.non_speculative(1, SHAPE.seconds(1, 1))
    before_s = cost.non_speculative_s(1)
    cost.non_speculative(1, 100.0)
    assert cost.non_speculative_s(1) < 1.1 * before_s


def test_without_a_profile_tokens_cost_nothing_and_the_first_steps_count_fully():
    cost = StepCost()
    cost.with_drafts(1, 1, 0.1)
    cost.with_drafts(1, 5, 0.2)
    assert cost.drafts_s(1, 1) == cost.drafts_s(1, 5) == pytest.approx(0.15)
    assert cost.non_speculative_s(1) == pytest.approx(0.15), "until a non-speculative step is measured"


def test_the_current_costs_of_both_kinds_are_separate():
    cost = StepCost(SHAPE)
    assert cost.non_speculative_cost is None, "none was measured"
    cost.with_drafts(1, 4, 2 * SHAPE.seconds(1, 4))
    cost.non_speculative(8, 3 * SHAPE.seconds(8, 8))
    assert cost.non_speculative_cost.seconds(8, 8) == pytest.approx(3 * SHAPE.seconds(8, 8))
    assert cost.cost.seconds(8, 8) == pytest.approx(2 * SHAPE.seconds(8, 8))


def test_non_speculative_steps_of_more_rows_never_cost_less():
    """This holds for any measurements, and beyond their range."""
    cost = StepCost(ForwardCost.linear(0.02, per_token_s=1e-5))
    cost.with_drafts(32, 64, 0.02)
    cost.non_speculative(32, 0.03)
    cost.non_speculative(64, 0.01)
    plain = cost.non_speculative_cost
    seconds = [plain.seconds(rows, rows) for rows in (1, 16, 32, 48, 64, 100, 200, 1000)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_the_current_cost_is_the_profile_at_the_measured_pace():
    cost = StepCost(SHAPE)
    assert cost.cost == SHAPE
    cost.with_drafts(1, 4, 2 * SHAPE.seconds(1, 4))
    assert cost.cost.seconds(3, 9) == pytest.approx(2 * SHAPE.seconds(3, 9))
