"""The planner: what it advises where the answer is known, what it shows, and what it refuses."""

import io
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.errors import ConfigError
from tools.cli import app
from tools.planning.command import PlanRequest, StatedCosts
from tools.planning.estimates import (
    PLAIN,
    CandidateFleet,
    InProcess,
    PlanQuestion,
    Prices,
    best_in_process,
    candidates,
    cost_per_million,
    plain_sessions,
    steady_sessions,
)
from tools.planning.plan import AtOnce, Watched, advise, run_count
from tools.planning.plan_report import advice_chart, advice_data, advice_report, verdict
from tools.planning.trial import (
    PlanAnswer,
    Point,
    choose,
    crossing,
    is_promising,
    limits,
    sessions_of_one,
    setting,
    sketch,
)
from tools.planning.trial import answer as fleet_answer
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson
from tools.simulation.setting import Mode

COSTS = CostModel(target=ForwardCost.linear(0.020), draft=DraftCost(forward=ForwardCost.linear(0.001)), hop_s=0.0003)
SMALL = PlanQuestion(
    COSTS, DraftQuality((0.9,)), ClosedLoop(2), prompt_tokens=8, new_tokens=32, block_lens=(4,), ratios=((1, 1), (2, 1))
)


def shown(report: object) -> str:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(report)
    return captured.get()


# ---------------------------------------------------------------- advice


def test_good_and_cheap_drafts_are_advised():
    tried = []
    advice = advise(SMALL, Watched(AtOnce(), lambda: tried.append(1)), whole=True)
    assert len(advice.answers) == 1 + 2 * 1 * 3
    assert len(tried) == run_count(SMALL, whole=True) == len(advice.answers) + 2, "and two limits"
    assert advice.best.candidate.block_len == 4
    assert advice.best.gain(advice.plain) > 2
    assert advice.at_once == 2
    assert advice.limits is not None
    assert advice.limits.acceptance is not None
    assert advice.limits.acceptance < 0.9
    assert advice.best.cost_per_million is None


def test_useless_drafts_are_not_advised():
    advice = advise(replace(SMALL, draft=DraftQuality((0.0,), runner_up=0.0)))
    assert advice.best.candidate == PLAIN
    assert "plain decoding" in verdict(SMALL, advice)


def test_drafts_that_cost_more_than_they_bring_are_not_advised():
    dear = advise(replace(SMALL, prices=Prices(target=1.0, drafter=1000.0)))
    assert dear.best.candidate == PLAIN
    assert advise(replace(SMALL, prices=Prices(target=1.0, drafter=0.01))).best.candidate.block_len == 4


LOCK_STEP = CandidateFleet(1, 1, 4, Mode.LOCK_STEP)


def test_where_nothing_that_drafts_is_advised_the_gain_is_that_of_a_drafter_for_each_target():
    advice = advise(replace(SMALL, draft=DraftQuality((0.0,), runner_up=0.0), ratios=((4, 1),)))
    assert advice.limits is not None
    assert advice.limits.candidate == LOCK_STEP


@pytest.mark.parametrize("power", [0.3, 1, 4])
@pytest.mark.parametrize("sign", [1, -1])
def test_where_a_function_is_nothing_is_found_in_few_steps(power: float, sign: int):
    asked = []

    def function(at: float) -> float:
        asked.append(at)
        return sign * (at**power - 0.3)

    found = crossing(function, Point(0.0, -0.3 * sign), Point(2.0, sign * (2.0**power - 0.3)))
    assert found == pytest.approx(0.3 ** (1 / power), abs=0.04)
    assert len(asked) <= 7


def test_no_drafting_is_short_enough_where_verification_alone_costs_what_it_brings():
    dear = COSTS.model_copy(update={"target": ForwardCost.linear(0.001, per_token_s=0.019)})
    found = limits(replace(SMALL, costs=dear), LOCK_STEP, 1, AtOnce())
    assert found.draft_s == 0.0
    assert found.acceptance is None


@pytest.mark.parametrize("arrivals", [ClosedLoop(1), ClosedLoop(20), Poisson(1.0), Poisson(20.0)])
def test_requests_come_for_as_long_whatever_the_fleet(arrivals):
    loads = [
        setting(replace(SMALL, arrivals=arrivals), CandidateFleet(targets, 1, 4, Mode.ADAPTIVE), sessions=40).load
        for targets in (1, 4)
    ]
    assert [load.sessions for load in loads] == [40, 4 * 40]


def test_the_more_run_at_once_the_longer_is_watched_whether_what_waits_grows():
    """A step of n sessions takes 20 ms and, with a token of the prompt for each that it decides, n ms."""
    costs = COSTS.model_copy(update={"target": ForwardCost.linear(0.020, per_token_s=0.0005)})
    asked = replace(SMALL, costs=costs, prompt_tokens=32, new_tokens=32)
    assert plain_sessions(asked, Poisson(500 / 32)) == pytest.approx(20.0, abs=0.01)
    watched = [sessions_of_one(replace(asked, arrivals=Poisson(tokens / 32))) for tokens in (10, 500, 960, 2000)]
    assert watched == [64, 8 * 20, 1024, 8 * 32], "nearly idle, busy, with 480 at once, and more than it can do"


CROWDED = CostModel(
    target=ForwardCost.linear(0.010, per_token_s=0.010),
    draft=DraftCost(forward=ForwardCost.linear(0.001)),
    hop_s=0.0003,
)
TOO_MUCH = replace(SMALL, costs=CROWDED, arrivals=Poisson(5.0))  # 160 tokens/s of a target that does less than 100


def test_whoever_keeps_up_is_advised_though_others_were_watched_for_less_long():
    """Latencies of those that do not keep up are as long as the run."""
    slow = answer(1, 50.0)
    hopeless = replace(answer(1, 90.0), latency_s=0.5, keeps_up=False)
    assert choose([hopeless, slow], replace(SMALL, arrivals=Poisson(1.0))) is slow


class Noted(AtOnce):
    """Keeps what it is asked to run."""

    def __init__(self) -> None:
        self.whole: list[CandidateFleet] = []
        self.short: list[CandidateFleet] = []

    def submit(self, run, /, *args, **kwargs):
        if run in (sketch, fleet_answer):
            (self.short if run is sketch else self.whole).append(args[1])
        return super().submit(run, *args, **kwargs)


def test_what_loses_with_a_drafter_of_its_own_is_not_tried_with_a_shared_one():
    pool = Noted()
    advise(replace(SMALL, block_lens=(1, 4)), pool)
    assert {fleet.block_len for fleet in pool.short if fleet.fleet == (1, 1)} == {1, 4}
    assert {fleet.block_len for fleet in pool.short if fleet.fleet == (2, 1)} == {4}, "one token gains half as much"


def test_a_shared_drafter_may_be_best_where_drafters_are_dear():
    """As fast as with one of its own it would be cheaper, though that is not the best so far."""
    plain = replace(answer(0, 60.0), candidate=PLAIN, cost_per_million=1.0)
    own = replace(answer(1, 100.0), cost_per_million=1.2)
    shared = CandidateFleet(4, 1, 4, Mode.ADAPTIVE)
    assert is_promising(shared, [plain, own], replace(SMALL, prices=Prices(0.2, 0.2)))
    assert not is_promising(shared, [plain, own], replace(SMALL, prices=Prices(0.2, 2.0)))
    assert is_promising(shared, [plain], SMALL), "nobody knows yet"
    assert not is_promising(shared, [plain, replace(own, keeps_up=False)], SMALL)


def answer(drafters: int, tokens_per_s: float, targets: int = 1) -> PlanAnswer:
    return PlanAnswer(CandidateFleet(targets, drafters, 4, Mode.ADAPTIVE), tokens_per_s, 1.0, 0.1, 0.5, 0.5, None)


def test_the_smaller_fleet_is_taken_where_it_is_as_good():
    assert choose([answer(2, 100.0), answer(1, 99.0)], SMALL).candidate.drafters == 1
    assert choose([answer(2, 100.0), answer(1, 97.0)], SMALL).candidate.drafters == 2
    assert choose([answer(1, 100.0), answer(1, 99.0, targets=2)], SMALL).candidate.targets == 2


def test_candidates_begin_with_plain_and_are_all_different():
    found = list(candidates(SMALL))
    assert found[0] == PLAIN
    assert len(set(found)) == len(found) == 7


def test_cost_counts_the_whole_fleet():
    fleet = CandidateFleet(2, 1, 4, Mode.ADAPTIVE)
    assert cost_per_million(Prices(36.0, 3.6), fleet, tokens_per_s=100.0) == pytest.approx(1e4 * 0.021)
    assert cost_per_million(None, fleet, 100.0) is None


def test_drafting_in_process_is_the_formula():
    inside = best_in_process(replace(SMALL, block_lens=(1, 4)))
    tokens = (1 - 0.9**5) / 0.1
    assert inside == InProcess(4, pytest.approx(2 * tokens / 0.024), pytest.approx(32 * 0.024 / tokens), None)


def test_littles_law():
    assert steady_sessions(30.0, lambda n: 10.0) == pytest.approx(3.0, abs=0.01)
    assert steady_sessions(30.0, lambda n: 20.0 / n) == 4096, "nothing is enough: all that may wait, wait"


# ---------------------------------------------------------------- what is shown


def test_the_report_says_what_to_take_and_compares():
    question = replace(SMALL, prices=Prices(10.0, 1.0))
    advice = advise(question, whole=True)
    text = shown(advice_report(question, advice))
    for words in ("in-process", "plain", "cost/1M", "least acceptance that pays", "Take 1 drafter"):
        assert words in text
    data = json.loads(json.dumps(advice_data(question, advice)))
    assert data["best"]["candidate"]["mode"] == advice.best.candidate.name
    assert len(data["answers"]) == 7
    assert data["question"]["arrivals"] == {"ClosedLoop": {"concurrency": 2, "batch": None}}


def test_chart_has_a_line_for_each_mode_and_a_level_for_each_rival():
    question = replace(SMALL, block_lens=(2, 4))
    axes = advice_chart(question, advise(question, whole=True)).axes[0]
    lines = {str(line.get_label()): line for line in axes.lines}
    modes = {"lock-step", "adaptive", "draft-ahead"}
    assert set(lines) == modes | {"plain", "in the target's process"}
    assert all(list(lines[mode].get_xdata()) == [2, 4] for mode in modes)


# ---------------------------------------------------------------- what is asked

STATED = StatedCosts(20.0, 0.5, 2.0, 0.1, 0.3)
ASKED = PlanRequest(None, STATED, None, None, None, 64, 64, None, None, None)


def test_stated_costs_mean_what_they_say():
    costs = STATED.model()
    assert costs.target.seconds(1, 1) == pytest.approx(0.020)
    assert costs.target.seconds(1, 9) == pytest.approx(0.024)
    assert costs.draft.seconds(1, 5) == pytest.approx(0.010)
    assert costs.draft.seconds(3, 5) == pytest.approx(0.011)
    assert costs.hop_s == pytest.approx(0.0003)


def test_costs_may_come_from_a_file(tmp_path: Path):
    COSTS.save(tmp_path / "costs.json")
    assert replace(ASKED, costs_path=tmp_path / "costs.json").question().costs == COSTS


def test_acceptance_by_position():
    assert replace(ASKED, acceptance=[0.9, 0.7]).question().draft == DraftQuality((0.9, 0.7))


def test_measured_acceptance_counts_where_none_is_stated(tmp_path: Path):
    measured = replace(ASKED, costs_path=tmp_path / "costs.json")
    COSTS.model_copy(update={"acceptance": (0.7, 0.6)}).save(tmp_path / "costs.json")
    question = measured.question()
    assert question.draft == DraftQuality((0.7, 0.6))
    assert question.acceptance_is.startswith("measured, from")
    stated = replace(measured, acceptance=[0.9]).question()
    assert (stated.draft, stated.acceptance_is) == (DraftQuality((0.9,)), "given")
    COSTS.save(tmp_path / "costs.json")
    assert measured.question().draft == ASKED.question().draft == DraftQuality((0.8,))
    assert measured.question().acceptance_is.startswith("assumed")


def test_the_report_says_what_acceptance_it_goes_by():
    question = replace(SMALL, draft=DraftQuality((0.9, 0.75)), acceptance_is="measured, from costs[1].json")
    text = " ".join(shown(advice_report(question, advise(question))).split())
    assert "Acceptance of draft tokens by position: 0.90, 0.75 (measured, from costs[1].json)" in text


@pytest.mark.parametrize("acceptance", ["[]", "[1.5]", "[-0.1]"])
def test_acceptance_that_is_no_chance_is_refused(tmp_path: Path, acceptance):
    saved = COSTS.model_dump_json().replace('"acceptance":null', f'"acceptance":{acceptance}')
    (tmp_path / "costs.json").write_text(saved)
    with pytest.raises(ConfigError, match="acceptance"):
        CostModel.load(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": 4, "rate": 1.0}, "give one of them"),
        ({"rate": 0.0}, "--rate is 0"),
        ({"target_price": 3.0}, "give both"),
        ({"stated": replace(STATED, target_step_ms=0.0)}, "--target-step-ms is 0"),
    ],
)
def test_what_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(ASKED, **changes).question()


def test_the_command_writes_what_is_asked_for(tmp_path: Path):
    arguments = [
        "--concurrency",
        1,
        "--new-tokens",
        8,
        "--block-len",
        2,
        "--json",
        tmp_path / "a",
        "--plot",
        tmp_path / "b",
    ]
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert "Where the gain ends" in result.output
    assert json.loads((tmp_path / "a").read_text())["question"]["new_tokens"] == 8
    ElementTree.fromstring((tmp_path / "b").read_text())
