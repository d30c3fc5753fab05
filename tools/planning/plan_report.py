"""Reports a plan as tables, JSON and a chart, and compares the formulas with the simulator.

The comparison uses the formulas' assumptions: one session at a time, equal step costs with and without a block, and a
target that waits for every block.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from cluster.costs import CostModel, DraftCost, ForwardCost
from serve_app.tables import shown, table
from tools.charts import line_chart, require_matplotlib, svg
from tools.planning.estimates import (
    MAX_CONCURRENT,
    CandidateFleet,
    InProcessResult,
    PlanInput,
    RoundCosts,
    break_even_draft_s,
    expected_tokens,
    lock_step,
    speed_up,
)
from tools.planning.plan import ProgressExecutor, Recommendation, fleet_count, processes, recommend, run_count
from tools.planning.trial import MIN_SHARE_MET, CandidateResult, Limits
from tools.progress import log_phase, progress
from tools.simulation.config import Mode, SimulationConfig, Speculation
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson, Workload
from tools.simulation.world import SimulationReport, World

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
DRAFT_LENGTHS = (3, 5, 7)
TOLERANCE = 0.05  # allowed relative deviation of the simulation from the formula
STEP_S = 0.02
HOP_S = 0.0005
LOAD = Workload(ClosedLoop(1), sessions=32, prompt_tokens=8, new_tokens=192)


@dataclass(frozen=True, slots=True)
class FormulaCheck:
    """Results by formula and by simulation for one acceptance and draft length, in lock step."""

    acceptance: float
    draft_tokens: int
    tokens: float  # tokens committed per verified block, by formula
    simulated_tokens: float
    gain: float  # gain by formula, with 0.1 target steps per draft token
    simulated_gain: float
    break_even_s: float  # duration of a drafting pass that cancels the gain, by formula
    gain_there: float  # simulated gain with that drafting pass; expected to be 1

    @property
    def break_even_steps(self) -> float:
        """Returns `break_even_s` as a multiple of a target step."""
        return self.break_even_s / STEP_S


def formula_checks(advance: Callable[[], None] = lambda: None) -> list[FormulaCheck]:
    """Compares every pair of acceptance rate and draft length; calls `advance` after each pair."""
    non_speculative_rate = _run(0.0, 0, 0.0).tokens_per_s
    found = []
    for acceptance, draft_tokens in product(ACCEPTANCES, DRAFT_LENGTHS):
        found.append(_formula_check(acceptance, draft_tokens, non_speculative_rate))
        advance()
    return found


def _formula_check(acceptance: float, draft_tokens: int, non_speculative_rate: float) -> FormulaCheck:
    tokens = expected_tokens(acceptance, draft_tokens)
    costs = RoundCosts(STEP_S, STEP_S, draft_tokens * STEP_S / 10, HOP_S)
    break_even_s = break_even_draft_s(tokens, costs)
    usual = _run(acceptance, draft_tokens, costs.draft_s)
    there = _run(acceptance, draft_tokens, break_even_s)
    assert usual.tokens_per_block is not None, "the simulation drafted no block"
    return FormulaCheck(
        acceptance,
        draft_tokens,
        tokens,
        usual.tokens_per_block,
        speed_up(tokens, lock_step(costs), STEP_S),
        usual.tokens_per_s / non_speculative_rate,
        break_even_s,
        there.tokens_per_s / non_speculative_rate,
    )


def _run(acceptance: float, draft_tokens: int, draft_s: float) -> SimulationReport:
    costs = CostModel(
        target=ForwardCost.linear(STEP_S),
        draft=DraftCost(forward=ForwardCost.linear(0.0), per_pass_s=draft_s),
        hop_s=HOP_S,
    )
    return World(
        SimulationConfig(costs, Speculation(draft_tokens, DraftQuality((acceptance,)), Mode.LOCK_STEP), LOAD)
    ).run()


MAX_TABLE_ROWS = 8  # best candidates in the table
GROWS = "grows"  # shown for a latency that grows without bound


def run_plan(inputs: PlanInput, console: Console, json_path: Path | None, picture_path: Path | None) -> None:
    """Simulates candidates, prints the recommendation, and writes the requested files. A chart needs all candidates."""
    if picture_path is not None:
        require_matplotlib()
    whole = picture_path is not None
    runs = run_count(inputs, whole)
    with processes() as pool, progress(console, "Fleets simulated", runs, transient=True) as advance:
        log_phase(console, f"Simulating {fleet_count(inputs)} fleets in up to {runs} runs")
        recommendation = recommend(inputs, ProgressExecutor(pool, advance), whole)
    console.print(recommendation_report(inputs, recommendation))
    if json_path is not None:
        json_path.write_text(json.dumps(recommendation_data(inputs, recommendation), indent=1) + "\n", encoding="utf-8")
    if picture_path is not None:
        picture_path.write_text(svg(recommendation_chart(inputs, recommendation)), encoding="utf-8")


def run_theory(console: Console) -> None:
    """Prints the comparison of formula and simulation."""
    total = len(ACCEPTANCES) * len(DRAFT_LENGTHS)
    with progress(console, "Formulas checked", total, transient=True) as advance:
        found = formula_checks(advance)
    console.print(theory_tables(found))


def recommendation_report(inputs: PlanInput, recommendation: Recommendation) -> Group:
    """Renders the recommendation, the compared candidates, and the limits of the gain."""
    limits = [] if recommendation.limits is None else [_limits_table(recommendation.limits)]
    by_position = ", ".join(f"{acceptance:.2f}" for acceptance in inputs.draft.acceptances)
    assumption = f"Acceptance of draft tokens by position: {by_position} ({escape(inputs.acceptance_source)})"
    return Group(
        assumption, _candidates_table(inputs, recommendation), *limits, recommendation_text(inputs, recommendation)
    )


def recommendation_text(inputs: PlanInput, recommendation: Recommendation) -> str:
    """Returns the recommendation in words."""
    best = recommendation.best.candidate
    arrivals = inputs.arrivals
    if isinstance(arrivals, Poisson) and not recommendation.best.keeps_up:
        rate = f"{arrivals.per_s:g} requests/s per target ({arrivals.per_s * inputs.new_tokens:g} tokens/s)"
        return f"No fleet keeps up with {rate}: latencies grow without bound. Lower --rate."
    if best.draft_tokens == 0:
        better = "better" if inputs.prices is None else "cheaper"
        return f"Use non-speculative decoding: no fleet with drafters is {better} under this load."
    per = f"{best.drafters} drafter{'s' * (best.drafters > 1)} for {best.targets} target{'s' * (best.targets > 1)}"
    return (
        f"Use {per}, blocks of up to {best.draft_tokens}, schedule {best.name}: {_gain_text(inputs, recommendation)}."
    )


def _gain_text(inputs: PlanInput, recommendation: Recommendation) -> str:
    """Returns the gain of the best candidate in words."""
    gain = _gain(inputs, recommendation.best, recommendation.plain)
    if not isinstance(inputs.arrivals, Poisson):
        return f"{gain} the throughput of non-speculative decoding"
    if not recommendation.plain.keeps_up:
        return "non-speculative decoding does not keep up with this rate"
    return f"{gain} the speed of an answer by non-speculative decoding"


def _gain(inputs: PlanInput, one: CandidateResult | InProcessResult, plain: CandidateResult) -> str:
    """Returns the gain over non-speculative decoding, in throughput or, under a given rate, in latency."""
    if not isinstance(inputs.arrivals, Poisson):
        return f"{one.tokens_per_s / plain.tokens_per_s:.2f}x"
    return f"{plain.latency_s / one.latency_s:.2f}x" if one.keeps_up and plain.keeps_up else shown(None)


def _candidates_table(inputs: PlanInput, recommendation: Recommendation) -> Table:
    load = "under the given rate" if isinstance(inputs.arrivals, Poisson) else "at the given concurrency"
    title = f"Simulated {load}: targets : drafters, draft length K, and results per target"
    made = table(title, "fleet", "K", "schedule", "tokens/s", "gain", "latency, s", "busy, %", "cost/1M")
    best_first = sorted(recommendation.results, key=lambda one: _rank(inputs, one))[:MAX_TABLE_ROWS]
    for result in dict.fromkeys([recommendation.best, *best_first, recommendation.plain]):
        made.add_row(
            *_row(inputs, result, recommendation.plain), style="bold" if result is recommendation.best else None
        )
    inside = recommendation.in_process
    made.add_row(
        "1 : 0",
        str(inside.draft_tokens),
        "in-process, by formula",
        shown(inside.tokens_per_s, ".1f"),
        _gain(inputs, inside, recommendation.plain),
        _latency(inside),
        "-",
        shown(inside.cost_per_million),
    )
    if isinstance(inputs.arrivals, Poisson) and not (
        inside.keeps_up and all(one.keeps_up for one in recommendation.results)
    ):
        made.caption = (
            f"{GROWS}: does not keep up. Less than {MIN_SHARE_MET:.0%} of the requested tokens were committed while "
            f"requests arrived; in-process, more than {MAX_CONCURRENT} sessions would run at once."
        )
    return made


def _latency(one: CandidateResult | InProcessResult) -> str:
    return shown(one.latency_s) if one.keeps_up else GROWS


def _row(inputs: PlanInput, result: CandidateResult, plain: CandidateResult) -> tuple[str, ...]:
    candidate = result.candidate
    return (
        f"{candidate.targets} : {candidate.drafters}",
        str(candidate.draft_tokens),
        candidate.name,
        shown(result.tokens_per_s, ".1f"),
        _gain(inputs, result, plain),
        _latency(result),
        f"{result.target_busy * 100:.0f} : {result.drafter_busy * 100:.0f}",
        shown(result.cost_per_million),
    )


def _rank(inputs: PlanInput, result: CandidateResult) -> tuple[bool, float]:
    if result.cost_per_million is not None:
        return not result.keeps_up, result.cost_per_million
    if isinstance(inputs.arrivals, Poisson) and result.keeps_up:
        return False, result.latency_s
    return not result.keeps_up, -result.tokens_per_s


def _limits_table(limits: Limits) -> Table:
    candidate = limits.candidate
    of = f"{candidate.targets} : {candidate.drafters}, K = {candidate.draft_tokens}"
    sessions = f"{limits.at_once} concurrent session{'s' * (limits.at_once > 1)} per target"
    made = table(f"Limits of the gain with lock_step: {of}, {sessions}", "what", "value")
    enough = limits.acceptance
    made.add_row("minimum acceptance for a gain", "none" if enough is None else f"{enough:.2f}")
    made.add_row("drafting pass that cancels the gain, ms", shown(limits.draft_s * 1e3, ".1f"))
    return made


def recommendation_data(inputs: PlanInput, recommendation: Recommendation) -> dict[str, Any]:
    """Returns all inputs and results as JSON-compatible data."""
    arrivals = {type(inputs.arrivals).__name__: asdict(inputs.arrivals)}
    asked = asdict(inputs) | {"costs": inputs.costs.model_dump(mode="json"), "arrivals": arrivals}
    inside = asdict(recommendation.in_process)
    limits = recommendation.limits
    return {
        "question": asked,
        "answers": [_result_data(result) for result in recommendation.results],
        "best": _result_data(recommendation.best),
        "in_process": inside,
        "sessions_at_once": recommendation.at_once,
        "limits": None if limits is None else asdict(limits) | {"candidate": _candidate_data(limits.candidate)},
    }


def _result_data(result: CandidateResult) -> dict[str, Any]:
    return asdict(result) | {"candidate": _candidate_data(result.candidate)}


def _candidate_data(candidate: CandidateFleet) -> dict[str, Any]:
    return asdict(candidate) | {"mode": candidate.name}


def recommendation_chart(inputs: PlanInput, recommendation: Recommendation) -> "Figure":
    """Plots speed or, under a given rate, latency against the draft length, for the recommended fleet.

    Omits candidates that do not keep up with the rate, since they have no latency; if none keeps up, plots speed.
    """
    best = recommendation.best.candidate
    ratio = (best.targets, best.drafters) if best.draft_tokens else inputs.ratios[0]
    drawn = [one for one in recommendation.results if one.candidate.draft_tokens and one.candidate.fleet == ratio]
    by_latency = isinstance(inputs.arrivals, Poisson) and any(one.keeps_up for one in drawn)

    def value(result: CandidateResult | InProcessResult) -> float:
        return result.latency_s if by_latency else result.tokens_per_s

    lines: dict[str, list[tuple[float, float]]] = {}
    for result in drawn:
        if result.keeps_up or not by_latency:
            lines.setdefault(result.candidate.name, []).append((result.candidate.draft_tokens, value(result)))
    rivals: dict[str, CandidateResult | InProcessResult] = {
        "plain": recommendation.plain,
        "in the target's process": recommendation.in_process,
    }
    levels = {name: value(rival) for name, rival in rivals.items() if rival.keeps_up or not by_latency}
    y_title = "latency of a request, s" if by_latency else "tokens/s of one target"
    return line_chart(lines, levels, f"draft length, {ratio[0]} targets : {ratio[1]} drafters", y_title)


# ---------------------------------------------------------------- theory


def theory_tables(formula_checks: list[FormulaCheck]) -> Group:
    """Tabulates formula and simulation side by side."""
    tokens = table(
        "Tokens committed per verify: (1 - g^(K+1)) / (1 - g)", "acceptance g, K", "formula", "simulated", "differs"
    )
    gains = table(
        "Gain over non-speculative decoding with lock_step, and the drafting pass that cancels it",
        "acceptance g, K",
        "formula",
        "simulated",
        "canceled at, target steps",
        "simulated there",
    )
    for check in formula_checks:
        name = f"{check.acceptance}, {check.draft_tokens}"
        differs = check.simulated_tokens / check.tokens - 1
        tokens.add_row(name, shown(check.tokens, ".3f"), shown(check.simulated_tokens, ".3f"), f"{differs:+.1%}")
        gains.add_row(
            name,
            f"{check.gain:.2f}x",
            f"{check.simulated_gain:.2f}x",
            shown(check.break_even_steps),
            f"{check.gain_there:.2f}x",
        )
    return Group(tokens, gains)
