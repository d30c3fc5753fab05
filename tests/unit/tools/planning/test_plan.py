"""Tests the planner: known recommendations, output and refusals."""

import io
import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.config import SpeculationConfig
from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.errors import ConfigError
from tools.cli import app
from tools.planning.command import plan_inputs, stated_costs
from tools.planning.estimates import (
    NON_SPECULATIVE,
    CandidateFleet,
    InProcessResult,
    PlanInput,
    Prices,
    best_in_process,
    candidates,
    cost_per_million,
    non_speculative_sessions,
    steady_sessions,
)
from tools.planning.plan import InlineExecutor, ProgressExecutor, Recommendation, recommend, run_count
from tools.planning.plan_report import (
    recommendation_chart,
    recommendation_data,
    recommendation_report,
    recommendation_text,
)
from tools.planning.trial import (
    MAX_SHORT_EVENTS,
    CandidateResult,
    Point,
    choose_best,
    crossing,
    is_promising,
    limits,
    sessions_per_target,
    simulate,
    simulate_briefly,
    simulation_config,
    warm_up_sessions,
)
from tools.simulation.config import Mode
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson
from tools.simulation.world import World

NO_HOST = {"host_step_s": 0.0, "host_row_s": 0.0}
COSTS = CostModel(
    target=ForwardCost.linear(0.020), draft=DraftCost(forward=ForwardCost.linear(0.001)), hop_s=0.0003, **NO_HOST
)
SMALL = PlanInput(
    COSTS,
    DraftQuality((0.9,)),
    ClosedLoop(2),
    prompt_tokens=8,
    new_tokens=32,
    draft_lengths=(4,),
    ratios=((1, 1), (2, 1)),
)
PRICED = replace(SMALL, prices=Prices(10.0, 1.0))


def shown(report: object) -> str:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(report)
    return captured.get()


# ---------------------------------------------------------------- recommendations


@pytest.fixture(scope="module")
def priced_plan() -> tuple[Recommendation, int]:
    """Returns the recommendation for PRICED among all candidates, and the number of simulations."""
    runs = []
    recommendation = recommend(PRICED, ProgressExecutor(InlineExecutor(), lambda: runs.append(1)), whole=True)
    return recommendation, len(runs)


def test_good_and_cheap_drafts_are_recommended(priced_plan):
    recommendation, runs = priced_plan
    assert len(recommendation.results) == 1 + 2 * 1 * 2
    assert runs == run_count(PRICED, whole=True) == len(recommendation.results) + 2, "and two limits"
    assert recommendation.best.candidate.draft_tokens == 4
    assert recommendation.best.gain(recommendation.plain) > 2
    assert recommendation.at_once == 2
    assert recommendation.limits.acceptance is not None
    assert recommendation.limits.acceptance < 0.9
    assert recommendation.best.cost_per_million is not None


def test_useless_drafts_are_not_recommended():
    recommendation = recommend(replace(SMALL, draft=DraftQuality((0.0,), runner_up=0.0)))
    assert recommendation.best.candidate == NON_SPECULATIVE
    assert recommendation.best.cost_per_million is None, "without prices"
    assert "non-speculative decoding" in recommendation_text(SMALL, recommendation)


def test_drafts_that_do_not_pay_are_not_recommended():
    dear = recommend(replace(SMALL, prices=Prices(target=1.0, drafter=1000.0)))
    assert dear.best.candidate == NON_SPECULATIVE
    assert recommend(replace(SMALL, prices=Prices(target=1.0, drafter=0.01))).best.candidate.draft_tokens == 4


LOCK_STEP = CandidateFleet(1, 1, 4, Mode.LOCK_STEP)


def test_the_gain_is_reported_for_one_drafter_per_target_if_none_pays():
    recommendation = recommend(replace(SMALL, draft=DraftQuality((0.0,), runner_up=0.0), ratios=((4, 1),)))
    assert recommendation.limits.candidate == LOCK_STEP


@pytest.mark.parametrize("power", [0.3, 1, 4])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_root_is_found_in_few_steps(power: float, sign: int):
    asked = []

    def function(at: float) -> float:
        asked.append(at)
        return sign * (at**power - 0.3)

    found = crossing(function, Point(0.0, -0.3 * sign), Point(2.0, sign * (2.0**power - 0.3)))
    assert found == pytest.approx(0.3 ** (1 / power), abs=0.04)
    assert len(asked) <= 7


def test_no_draft_time_pays_if_verification_alone_costs_the_gain():
    dear = COSTS.model_copy(update={"target": ForwardCost.linear(0.001, per_token_s=0.019)})
    found = limits(replace(SMALL, costs=dear), LOCK_STEP, 1, InlineExecutor())
    assert found.draft_s == 0.0
    assert found.acceptance is None


@pytest.mark.parametrize("arrivals", [ClosedLoop(1), ClosedLoop(20), Poisson(1.0), Poisson(20.0)])
def test_arrivals_last_equally_long_for_every_fleet(arrivals):
    loads = [
        simulation_config(
            replace(SMALL, arrivals=arrivals), CandidateFleet(targets, 1, 4, Mode.NO_LOOKAHEAD), sessions=40
        ).load
        for targets in (1, 4)
    ]
    assert [load.sessions for load in loads] == [40, 4 * 40]


def test_a_trial_measures_the_steady_state():
    """A drafter shared by two targets needs ten seconds until its drafts ahead pay; then it is a quarter faster."""
    slow = stated_costs(20.0, 0.1, 3.0, 0.6, 0.3)
    inputs = replace(SMALL, costs=slow, draft=DraftQuality((0.8,)), arrivals=ClosedLoop(4), new_tokens=64)
    shared = CandidateFleet(2, 1, 3, Mode.ADAPTIVE)
    settled = World(simulation_config(inputs, shared, sessions=160)).run().tokens_per_s / 2
    assert simulate(inputs, shared).tokens_per_s == pytest.approx(settled, rel=0.05)


def test_more_concurrency_needs_a_longer_trial():
    """A step of n sessions takes 20 ms, plus n ms with one prompt token per decided token."""
    costs = COSTS.model_copy(update={"target": ForwardCost.linear(0.020, per_token_s=0.0005)})
    asked = replace(SMALL, costs=costs, prompt_tokens=32, new_tokens=32)
    assert non_speculative_sessions(asked, Poisson(500 / 32)) == pytest.approx(20.0, abs=0.01)
    watched = [sessions_per_target(replace(asked, arrivals=Poisson(tokens / 32))) for tokens in (10, 500, 960, 2000)]
    assert watched == [64, 8 * 20, 1024, 8 * 32], "nearly idle, busy, with 480 at once, and more than it can do"


SLOW = COSTS.model_copy(update={"target": ForwardCost.linear(0.1, per_token_s=0.01)})


def test_the_events_of_a_run_are_limited_for_any_load_and_costs(monkeypatch):
    """Four targets with one session each verify 30,000 tokens separately, in 150,000 events without the limit."""
    reports = []
    run = World.run
    monkeypatch.setattr(World, "run", lambda world: reports.append(run(world)) or reports[-1])
    inputs = replace(SMALL, costs=SLOW, draft=DraftQuality((0.5, 0.2)), arrivals=Poisson(0.1), new_tokens=64)
    shared = CandidateFleet(4, 1, 2, Mode.ADAPTIVE)
    brief = simulate_briefly(inputs, shared)
    assert reports[0].events < 1.2 * MAX_SHORT_EVENTS, "running sessions end"
    assert reports[0].sessions > 4 * warm_up_sessions(inputs) / 2
    assert brief.tokens_per_s > 0
    assert brief.latency_s > 0


def test_the_warm_up_grows_with_the_load():
    few, many, overload = (replace(SMALL, arrivals=Poisson(rate)) for rate in (0.1, 20.0, 1000.0))
    assert warm_up_sessions(few) == 768 / 32, "as with one concurrent session"
    assert warm_up_sessions(many) == warm_up_sessions(overload) == 3072 / 32


CROWDED = CostModel(
    target=ForwardCost.linear(0.010, per_token_s=0.010),
    draft=DraftCost(forward=ForwardCost.linear(0.001)),
    hop_s=0.0003,
)
TOO_MUCH = replace(SMALL, costs=CROWDED, arrivals=Poisson(5.0))  # 160 tokens/s for a target below 100 tokens/s


def test_only_a_fleet_that_keeps_up_is_recommended():
    """An overloaded fleet's latencies grow with the length of the run."""
    slow = result(1, 50.0)
    hopeless = replace(result(1, 90.0), latency_s=0.5, keeps_up=False)
    assert choose_best([hopeless, slow], replace(SMALL, arrivals=Poisson(1.0))) is slow


def test_prices_decide_among_fleets_that_keep_up_with_a_rate():
    inputs = replace(PRICED, arrivals=Poisson(1.0))
    fast = replace(result(2, 32.0), latency_s=0.5, cost_per_million=9.0)
    cheap = replace(result(1, 32.0), latency_s=0.9, cost_per_million=5.0)
    between = replace(result(3, 32.0), latency_s=0.8, cost_per_million=7.0)
    overloaded = replace(result(1, 90.0), cost_per_million=1.0, keeps_up=False)
    results = (fast, overloaded, between, cheap)
    assert choose_best(results, inputs) is cheap
    plan = Recommendation(results, cheap, fast, best_in_process(inputs), 1.0, None)
    text = shown(recommendation_report(inputs, plan))
    places = [text.index(cost) for cost in ("5.00 │", "7.00 │", "9.00 │", "1.00 │")]
    assert places == sorted(places), text


def test_an_overloaded_fleet_has_a_latency_although_all_sessions_arrive_early():
    result = simulate_briefly(replace(SMALL, arrivals=Poisson(200.0)), CandidateFleet(1, 1, 4, Mode.ADAPTIVE))
    assert result.latency_s > 0


def test_a_price_may_be_zero():
    free = replace(SMALL, prices=Prices(target=0.0, drafter=1.0), ratios=((1, 1),))
    assert recommend(free).best.candidate == NON_SPECULATIVE


class Noted(InlineExecutor):
    """Executor that records the simulated candidates."""

    def __init__(self) -> None:
        self.whole: list[CandidateFleet] = []
        self.short: list[CandidateFleet] = []

    def submit(self, run, /, *args, **kwargs):
        if run in (simulate_briefly, simulate):
            (self.short if run is simulate_briefly else self.whole).append(args[1])
        return super().submit(run, *args, **kwargs)


def test_a_mode_that_loses_alone_is_not_tried_with_a_shared_drafter():
    pool = Noted()
    recommend(replace(SMALL, draft_lengths=(1, 4)), pool)
    assert {fleet.draft_tokens for fleet in pool.short if fleet.fleet == (1, 1)} == {1, 4}
    assert {fleet.draft_tokens for fleet in pool.short if fleet.fleet == (2, 1)} == {4}, "one token gains half as much"


def test_a_shared_drafter_may_be_best_if_drafters_are_expensive():
    """A shared drafter is cheaper at equal speed, even though it is not the best so far."""
    plain = replace(result(0, 60.0), candidate=NON_SPECULATIVE, cost_per_million=1.0)
    own = replace(result(1, 100.0), cost_per_million=1.2)
    shared = CandidateFleet(4, 1, 4, Mode.NO_LOOKAHEAD)
    assert is_promising(shared, [plain, own], replace(SMALL, prices=Prices(0.2, 0.2)))
    assert not is_promising(shared, [plain, own], replace(SMALL, prices=Prices(0.2, 2.0)))
    assert is_promising(shared, [plain], SMALL), "nobody knows yet"
    assert not is_promising(shared, [plain, replace(own, keeps_up=False)], SMALL)


def result(drafters: int, tokens_per_s: float, targets: int = 1) -> CandidateResult:
    return CandidateResult(
        CandidateFleet(targets, drafters, 4, Mode.NO_LOOKAHEAD), tokens_per_s, 1.0, 0.1, 0.5, 0.5, None
    )


def test_the_smaller_of_equal_fleets_is_recommended():
    assert choose_best([result(2, 100.0), result(1, 99.0)], SMALL).candidate.drafters == 1
    assert choose_best([result(2, 100.0), result(1, 97.0)], SMALL).candidate.drafters == 2
    assert choose_best([result(1, 100.0), result(1, 99.0, targets=2)], SMALL).candidate.targets == 2


def test_the_adaptive_schedule_is_recommended_among_equals():
    adaptive = replace(result(1, 99.0), candidate=CandidateFleet(1, 1, 4, Mode.ADAPTIVE))
    lock_step = replace(result(1, 100.0), candidate=LOCK_STEP)
    assert choose_best([lock_step, adaptive], SMALL) is adaptive
    assert choose_best([lock_step, replace(adaptive, tokens_per_s=97.0)], SMALL) is lock_step


def test_schedules_have_the_names_of_the_configuration():
    schedules = get_args(SpeculationConfig.model_fields["schedule"].annotation)
    assert {fleet.name for fleet in candidates(SMALL)} == {"plain", *schedules}


def test_candidates_begin_without_speculation_and_are_distinct():
    found = list(candidates(SMALL))
    assert found[0] == NON_SPECULATIVE
    assert len(set(found)) == len(found) == 5


def test_cost_counts_the_whole_fleet():
    fleet = CandidateFleet(2, 1, 4, Mode.NO_LOOKAHEAD)
    assert cost_per_million(Prices(36.0, 3.6), fleet, tokens_per_s=100.0) == pytest.approx(1e4 * 0.021)
    assert cost_per_million(None, fleet, 100.0) is None


def test_drafting_in_process_is_the_formula():
    inside = best_in_process(replace(SMALL, draft_lengths=(1, 4)))
    tokens = (1 - 0.9**5) / 0.1
    assert inside == InProcessResult(4, pytest.approx(2 * tokens / 0.024), pytest.approx(32 * 0.024 / tokens), None)


def test_littles_law():
    assert steady_sessions(30.0, lambda n: 10.0) == pytest.approx(3.0, abs=0.01)
    assert steady_sessions(30.0, lambda n: 20.0 / n) == 4096, "nothing is enough: all that may wait, wait"


# ---------------------------------------------------------------- output


def test_report_recommends_and_compares(priced_plan):
    recommendation, _ = priced_plan
    text = shown(recommendation_report(PRICED, recommendation))
    for words in ("in-process", "plain", "cost/1M", "minimum acceptance for a gain", "Use 1 drafter"):
        assert words in text
    data = json.loads(json.dumps(recommendation_data(PRICED, recommendation)))
    assert data["best"]["candidate"]["mode"] == recommendation.best.candidate.name
    assert len(data["answers"]) == 5
    assert data["question"]["arrivals"] == {"ClosedLoop": {"concurrency": 2, "batch": None}}


def test_chart_has_a_line_for_each_mode_and_a_level_for_each_rival():
    inputs = replace(SMALL, draft_lengths=(2, 4), ratios=((1, 1),))
    axes = recommendation_chart(inputs, recommend(inputs, whole=True)).axes[0]
    lines = {str(line.get_label()): line for line in axes.lines}
    modes = {"lock_step", "adaptive"}
    assert set(lines) == modes | {"plain", "in the target's process"}
    assert all(list(lines[mode].get_xdata()) == [2, 4] for mode in modes)


# ---------------------------------------------------------------- input

STATED = stated_costs(20.0, 0.5, 2.0, 0.1, 0.3)


def test_stated_costs():
    costs = STATED
    assert costs.target.seconds(1, 1) == pytest.approx(0.020)
    assert costs.target.seconds(1, 9) == pytest.approx(0.024)
    assert costs.draft.seconds(1, 5) == pytest.approx(0.010)
    assert costs.draft.seconds(3, 5) == pytest.approx(0.011)
    assert costs.hop_s == pytest.approx(0.0003)


def test_costs_may_come_from_a_file(tmp_path: Path):
    COSTS.save(tmp_path / "costs.json")
    assert plan_inputs(STATED, tmp_path / "costs.json").costs == COSTS


def test_acceptance_by_position():
    assert plan_inputs(STATED, acceptance=[0.9, 0.7]).draft == DraftQuality((0.9, 0.7))


def test_measured_acceptance_is_the_default(tmp_path: Path):
    path = tmp_path / "costs.json"
    COSTS.model_copy(update={"acceptance": (0.7, 0.6)}).save(path)
    inputs = plan_inputs(STATED, path)
    assert inputs.draft == DraftQuality((0.7, 0.6))
    assert inputs.acceptance_source.startswith("measured, from")
    stated = plan_inputs(STATED, path, acceptance=[0.9])
    assert (stated.draft, stated.acceptance_source) == (DraftQuality((0.9,)), "given")
    COSTS.save(path)
    assert plan_inputs(STATED, path).draft == plan_inputs(STATED).draft == DraftQuality((0.8,))
    assert plan_inputs(STATED, path).acceptance_source.startswith("assumed")


def test_report_states_the_acceptance(priced_plan):
    inputs = replace(SMALL, draft=DraftQuality((0.9, 0.75)), acceptance_source="measured, from costs[1].json")
    text = " ".join(shown(recommendation_report(inputs, priced_plan[0])).split())
    assert "Acceptance of draft tokens by position: 0.90, 0.75 (measured, from costs[1].json)" in text


@pytest.mark.parametrize("acceptance", ["[]", "[1.5]", "[-0.1]"])
def test_acceptance_outside_zero_to_one_is_refused(tmp_path: Path, acceptance):
    saved = COSTS.model_dump_json().replace('"acceptance":null', f'"acceptance":{acceptance}')
    (tmp_path / "costs.json").write_text(saved)
    with pytest.raises(ConfigError, match="acceptance"):
        CostModel.load(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": 4, "rate": 1.0}, "give only one of them"),
        ({"rate": 0.0}, "--rate is 0"),
        ({"target_price": 3.0}, "give both"),
        ({"target_price": 0.0, "drafter_price": 0.0}, "give a positive price"),
    ],
)
def test_contradictory_options_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan_inputs(STATED, **changes)


def test_zero_step_times_are_refused():
    with pytest.raises(ConfigError, match="--target-step-ms is 0"):
        stated_costs(0.0, 0.5, 2.0, 0.1, 0.3)


def test_the_command_writes_the_requested_files(tmp_path: Path):
    arguments = [
        "--concurrency",
        1,
        "--new-tokens",
        8,
        "--draft-tokens",
        2,
        "--json",
        tmp_path / "a",
        "--plot",
        tmp_path / "b",
    ]
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert "Limits of the gain" in result.stdout
    assert result.stderr.startswith("Simulating 9 fleets in up to 11 runs\nFleets simulated: 1 of 11\n")
    assert json.loads((tmp_path / "a").read_text())["question"]["new_tokens"] == 8
    ElementTree.fromstring((tmp_path / "b").read_text())


def test_a_stopped_command_leaves_neither_processes_nor_semaphores():
    command = [sys.executable, "-c", "from tools.cli import main\nif __name__ == '__main__': main()", "plan"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        errors = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        errors += process.stderr.read()  # ends once the pool's processes have ended, too
    assert errors.startswith("Simulating")
    assert "semaphore" not in errors
    assert process.returncode == 130
