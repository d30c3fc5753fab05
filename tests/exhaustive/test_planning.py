"""What `slipstream plan` advises of fleets by long simulations, and where theory says the same.

Not part of the default suite: `make test-exhaustive`.
"""

from dataclasses import replace

import pytest

from cluster.costs import DraftCost, ForwardCost
from tests.unit.tools.planning.test_plan import COSTS, LOCK_STEP, SMALL, TOO_MUCH, Noted, shown
from tools.planning.estimates import (
    PLAIN,
    CandidateFleet,
    RoundCosts,
    break_even_draft_s,
    candidates,
    expected_tokens,
    lock_step,
)
from tools.planning.plan import Advice, AtOnce, advise, processes
from tools.planning.plan_report import (
    ACCEPTANCES,
    BLOCK_LENS,
    TOLERANCE,
    advice_chart,
    advice_data,
    advice_report,
    lessons,
    theory_tables,
    verdict,
)
from tools.planning.trial import answer as fleet_answer
from tools.planning.trial import limits
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson
from tools.simulation.setting import Mode


def test_with_a_drafter_of_its_own_a_target_gains_as_far_as_the_formula_says():
    found = limits(replace(SMALL, new_tokens=192), LOCK_STEP, 1, AtOnce())
    costs = RoundCosts(non_speculative_s=0.020, verify_s=0.020, draft_s=0.004, hop_s=0.0003)
    assert found.acceptance is not None
    assert expected_tokens(found.acceptance, 4) == pytest.approx(lock_step(costs) / costs.non_speculative_s, abs=0.03)
    assert found.draft_s == pytest.approx(break_even_draft_s((1 - 0.9**5) / 0.1, costs), rel=0.05)


def test_where_targets_share_a_drafter_the_gain_ends_earlier():
    """The drafter is busy for longer than a target's step: with four of them a round is four passes, or nearly."""
    costs = COSTS.model_copy(update={"draft": DraftCost(forward=ForwardCost.linear(0.001, per_row_s=0.0005))})
    question = replace(SMALL, costs=costs, arrivals=ClosedLoop(4), ratios=((4, 1),))
    advice = advise(question)
    assert advice.limits is not None
    assert advice.limits.candidate == CandidateFleet(4, 1, 4, Mode.LOCK_STEP)
    alone = limits(question, LOCK_STEP, 4, AtOnce())
    assert advice.limits.acceptance is not None
    assert alone.acceptance is not None
    assert advice.limits.acceptance > alone.acceptance + 0.1
    assert advice.limits.draft_s < 0.9 * alone.draft_s
    there = replace(question, draft=DraftQuality((advice.limits.acceptance,)))
    assert fleet_answer(there, advice.limits.candidate).gain(advice.plain) == pytest.approx(1.0, rel=0.05)
    assert "lock-step: 4 : 1, K = 4, 4 sessions" in " ".join(shown(advice_report(question, advice)).split())
    found = advice_data(question, advice)["limits"]
    assert (found["candidate"]["targets"], found["candidate"]["mode"], found["at_once"]) == (4, "lock-step", 4)


def test_processes_come_to_the_same_advice():
    assert advise(SMALL) == _in_processes()


def _in_processes() -> Advice:
    with processes() as pool:
        return advise(SMALL, pool)


def test_under_a_given_rate_latency_decides():
    question = replace(SMALL, arrivals=Poisson(1.0))
    advice = advise(question)
    assert advice.best.latency_s < advice.plain.latency_s / 1.5
    gain = advice.plain.latency_s / advice.best.latency_s
    assert f"{gain:.2f}x the speed of an answer by plain decoding" in verdict(question, advice)
    assert 0 < advice.at_once < 2
    assert advice.in_process.latency_s < advice.plain.latency_s


def test_what_does_not_keep_up_has_no_latency_to_show():
    question = replace(SMALL, arrivals=Poisson(1.0))
    advice = advise(question, whole=True)
    plain = replace(advice.plain, keeps_up=False)
    others = [replace(one, keeps_up=one.candidate.mode is not Mode.LOCK_STEP) for one in advice.answers[1:]]
    some = replace(advice, answers=(plain, *others), plain=plain)
    assert "plain decoding does not keep up" in verdict(question, some)
    assert "grows" in shown(advice_report(question, some))
    assert "grows" not in shown(advice_report(question, advice))
    labels = {line.get_label() for line in advice_chart(question, some).axes[0].lines}
    assert "adaptive" in labels
    assert labels.isdisjoint({"lock-step", "plain"})


def test_a_rate_that_nothing_keeps_up_with_is_said_to_be_too_high():
    advice = advise(TOO_MUCH)
    assert not any(one.keeps_up for one in (*advice.answers, advice.in_process))
    assert advice.best.tokens_per_s >= 0.98 * max(one.tokens_per_s for one in advice.answers), "latencies mean nothing"
    text = " ".join(shown(advice_report(TOO_MUCH, advice)).split())
    assert "No fleet keeps up with 5 requests a second on each target, 160 tokens/s" in text
    assert "grows: does not keep up" in text
    assert "Take" not in text
    assert advice.limits is None, "there is no number of sessions at once"
    assert "Where the gain ends" not in text
    assert not any(one["keeps_up"] for one in advice_data(TOO_MUCH, advice)["answers"])
    assert advice_chart(TOO_MUCH, advice).axes[0].get_ylabel() == "tokens/s of one target"


@pytest.mark.parametrize("arrivals", [ClosedLoop(2), Poisson(1.0)])
def test_what_loses_in_short_runs_is_not_tried_in_whole_ones_and_the_advice_is_the_same(arrivals):
    question = replace(SMALL, arrivals=arrivals, block_lens=(1, 4))
    pool = Noted()
    advice = advise(question, pool)
    assert advice.best.candidate == advise(question, whole=True).best.candidate
    assert advice.plain.candidate == PLAIN, "it is what all else is compared with, however slow"
    assert [one.candidate for one in advice.answers] == pool.whole
    assert set(pool.whole) < set(pool.short)
    assert {fleet.block_len for fleet in pool.whole} == {0, 4}


def test_where_none_of_the_best_in_short_runs_keeps_up_all_are_tried():
    assert len(advise(TOO_MUCH).answers) == len(list(candidates(TOO_MUCH)))


def test_formula_and_simulation_agree():
    found = lessons()
    assert [(lesson.acceptance, lesson.block_len) for lesson in found] == [
        (g, k) for g in ACCEPTANCES for k in BLOCK_LENS
    ]
    for lesson in found:
        assert lesson.simulated_tokens == pytest.approx(lesson.tokens, rel=TOLERANCE)
        assert lesson.simulated_gain == pytest.approx(lesson.gain, rel=TOLERANCE)
        assert lesson.gain_there == pytest.approx(1.0, rel=TOLERANCE)
    text = shown(theory_tables(found))
    assert "5.695" in text, "0.9, 7 by the formula"
