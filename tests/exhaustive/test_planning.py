"""What `slipstream plan` advises of fleets by long simulations, and where theory says the same.

Not part of the default suite: `make test-exhaustive`.
"""

from dataclasses import replace

import pytest

from cluster.simulation.workload import ClosedLoop, Poisson
from serve_app.planning.plan import advise
from serve_app.planning.plan_report import advice_data, advice_picture, advice_report, theory_tables
from serve_app.planning.question import PLAIN, candidates
from serve_app.planning.theory import ACCEPTANCES, BLOCK_LENS, TOLERANCE, lessons
from tests.unit.serve_app.planning.test_plan import SMALL, TOO_MUCH, Noted, shown


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
    assert "tokens/s of one target" in advice_picture(TOO_MUCH, advice)


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
