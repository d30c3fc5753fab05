"""Compares the advice of `slipstream plan` with long simulations and with theory.

Not part of the default suite: `make test-exhaustive`.
"""

from dataclasses import replace

import pytest

from cluster.costs import DraftCost, ForwardCost
from tests.unit.tools.planning.test_plan import COSTS, LOCK_STEP, SMALL, TOO_MUCH, Noted, shown
from tools.planning.estimates import (
    NON_SPECULATIVE,
    CandidateFleet,
    RoundCosts,
    break_even_draft_s,
    candidates,
    expected_tokens,
    lock_step,
)
from tools.planning.plan import InlineExecutor, Recommendation, processes, recommend
from tools.planning.plan_report import (
    ACCEPTANCES,
    DRAFT_LENGTHS,
    TOLERANCE,
    formula_checks,
    recommendation_chart,
    recommendation_data,
    recommendation_report,
    recommendation_text,
    theory_tables,
)
from tools.planning.trial import limits, simulate
from tools.simulation.config import Mode
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson


def test_a_target_with_its_own_drafter_gains_as_predicted():
    found = limits(replace(SMALL, new_tokens=192), LOCK_STEP, 1, InlineExecutor())
    costs = RoundCosts(non_speculative_s=0.020, verify_s=0.020, draft_s=0.004, hop_s=0.0003)
    assert found.acceptance is not None
    assert expected_tokens(found.acceptance, 4) == pytest.approx(lock_step(costs) / costs.non_speculative_s, abs=0.03)
    assert found.draft_s == pytest.approx(break_even_draft_s((1 - 0.9**5) / 0.1, costs), rel=0.05)


def test_a_shared_drafter_lowers_the_maximum_gain():
    """Four targets keep the drafter busy for longer than a target step, so a round takes almost four passes."""
    costs = COSTS.model_copy(update={"draft": DraftCost(forward=ForwardCost.linear(0.001, per_row_s=0.0005))})
    inputs = replace(SMALL, costs=costs, arrivals=ClosedLoop(4), ratios=((4, 1),))
    recommendation = recommend(inputs)
    assert recommendation.limits.candidate == CandidateFleet(4, 1, 4, Mode.LOCK_STEP)
    alone = limits(inputs, LOCK_STEP, 4, InlineExecutor())
    assert recommendation.limits.acceptance is not None
    assert alone.acceptance is not None
    assert recommendation.limits.acceptance > alone.acceptance + 0.1
    assert recommendation.limits.draft_s < 0.9 * alone.draft_s
    there = replace(inputs, draft=DraftQuality((recommendation.limits.acceptance,)))
    assert simulate(there, recommendation.limits.candidate).gain(recommendation.plain) == pytest.approx(1.0, rel=0.05)
    assert "lock_step: 4 : 1, K = 4, 4 concurrent sessions" in " ".join(
        shown(recommendation_report(inputs, recommendation)).split()
    )
    found = recommendation_data(inputs, recommendation)["limits"]
    assert (found["candidate"]["targets"], found["candidate"]["mode"], found["at_once"]) == (4, "lock_step", 4)


def test_parallel_processes_give_the_same_advice():
    assert recommend(SMALL) == _in_processes()


def _in_processes() -> Recommendation:
    with processes() as pool:
        return recommend(SMALL, pool)


def test_under_a_given_rate_latency_decides():
    inputs = replace(SMALL, arrivals=Poisson(1.0))
    recommendation = recommend(inputs)
    assert recommendation.best.latency_s < recommendation.plain.latency_s / 1.5
    gain = recommendation.plain.latency_s / recommendation.best.latency_s
    assert f"{gain:.2f}x the speed of an answer by non-speculative decoding" in recommendation_text(
        inputs, recommendation
    )
    assert 0 < recommendation.at_once < 2
    assert recommendation.in_process.latency_s < recommendation.plain.latency_s


def test_an_overloaded_candidate_shows_no_latency():
    inputs = replace(SMALL, arrivals=Poisson(1.0))
    recommendation = recommend(inputs, whole=True)
    plain = replace(recommendation.plain, keeps_up=False)
    others = [replace(one, keeps_up=one.candidate.mode is not Mode.LOCK_STEP) for one in recommendation.results[1:]]
    some = replace(recommendation, results=(plain, *others), plain=plain)
    assert "non-speculative decoding does not keep up" in recommendation_text(inputs, some)
    assert "grows" in shown(recommendation_report(inputs, some))
    assert "grows" not in shown(recommendation_report(inputs, recommendation))
    labels = {line.get_label() for line in recommendation_chart(inputs, some).axes[0].lines}
    assert "adaptive" in labels
    assert labels.isdisjoint({"lock_step", "plain"})


def test_an_unsustainable_rate_is_reported():
    recommendation = recommend(TOO_MUCH)
    assert not any(one.keeps_up for one in (*recommendation.results, recommendation.in_process))
    assert recommendation.best.tokens_per_s >= 0.98 * max(one.tokens_per_s for one in recommendation.results), (
        "latencies mean nothing"
    )
    text = " ".join(shown(recommendation_report(TOO_MUCH, recommendation)).split())
    assert "No fleet keeps up with 5 requests/s per target (160 tokens/s)" in text
    assert "grows: does not keep up" in text
    assert "Take" not in text
    assert recommendation.limits is None, "there is no number of sessions at once"
    assert "Limits of the gain" not in text
    assert not any(one["keeps_up"] for one in recommendation_data(TOO_MUCH, recommendation)["answers"])
    assert recommendation_chart(TOO_MUCH, recommendation).axes[0].get_ylabel() == "tokens/s of one target"


@pytest.mark.parametrize("arrivals", [ClosedLoop(2), Poisson(1.0)])
def test_losers_of_short_runs_skip_full_runs_without_changing_the_advice(arrivals):
    inputs = replace(SMALL, arrivals=arrivals, draft_lengths=(1, 4))
    pool = Noted()
    recommendation = recommend(inputs, pool)
    assert recommendation.best.candidate == recommend(inputs, whole=True).best.candidate
    assert recommendation.plain.candidate == NON_SPECULATIVE, "it is what all else is compared with, however slow"
    assert [one.candidate for one in recommendation.results] == pool.whole
    assert set(pool.whole) < set(pool.short)
    assert {fleet.draft_tokens for fleet in pool.whole} == {0, 4}


def test_if_no_leader_of_short_runs_keeps_up_all_candidates_get_full_runs():
    assert len(recommend(TOO_MUCH).results) == len(list(candidates(TOO_MUCH)))


def test_formula_and_simulation_agree():
    found = formula_checks()
    assert [(check.acceptance, check.draft_tokens) for check in found] == [
        (g, k) for g in ACCEPTANCES for k in DRAFT_LENGTHS
    ]
    for check in found:
        assert check.simulated_tokens == pytest.approx(check.tokens, rel=TOLERANCE)
        assert check.simulated_gain == pytest.approx(check.gain, rel=TOLERANCE)
        assert check.gain_there == pytest.approx(1.0, rel=TOLERANCE)
    text = shown(theory_tables(found))
    assert "5.695" in text, "0.9, 7 by the formula"
