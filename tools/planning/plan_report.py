"""Output of a plan as terminal tables, as data and as a picture, with a progress bar while it is computed.

Mean gain of speculation: formula versus simulation.

The simulation keeps the formula's assumptions: one session at a time, a step that costs the same for one token and for
a block, and a target that waits for every block.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from cluster.costs import CostModel, DraftCost, ForwardCost
from serve_app.tables import shown, table
from tools.charts import line_chart, require_matplotlib, svg
from tools.planning.estimates import (
    CROWD,
    CandidateFleet,
    InProcess,
    PlanQuestion,
    RoundCosts,
    break_even_draft_s,
    expected_tokens,
    speed_up,
)
from tools.planning.plan import Advice, Watched, advise, processes, run_count
from tools.planning.trial import KEPT_UP, Limits, PlanAnswer
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson, Workload
from tools.simulation.setting import Mode, Setting, SpeculationSetting
from tools.simulation.world import SimulationReport, World

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
BLOCK_LENS = (3, 5, 7)
TOLERANCE = 0.05  # allowed deviation of the simulation, relative to the formula
STEP_S = 0.02
HOP_S = 0.0005
LOAD = Workload(ClosedLoop(1), sessions=32, prompt_tokens=8, new_tokens=192)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Comparison for one acceptance and block length, drafted in lock step."""

    acceptance: float
    block_len: int
    tokens: float  # committed per verified block, by formula
    simulated_tokens: float
    gain: float  # over non-speculative decoding if drafting a token takes a tenth of a step, by formula
    simulated_gain: float
    break_even_s: float  # drafting pass that cancels the gain, by formula
    gain_there: float  # over non-speculative decoding with that pass, by simulation; 1 expected

    @property
    def break_even_steps(self) -> float:
        """`break_even_s` in target steps."""
        return self.break_even_s / STEP_S


def lessons(advance: Callable[[], None] = lambda: None) -> list[Lesson]:
    """Computes every acceptance and block length; `advance` is called after each."""
    non_speculative_rate = _run(0.0, 0, 0.0).tokens_per_s
    found = []
    for acceptance, block_len in product(ACCEPTANCES, BLOCK_LENS):
        found.append(_lesson(acceptance, block_len, non_speculative_rate))
        advance()
    return found


def _lesson(acceptance: float, block_len: int, non_speculative_rate: float) -> Lesson:
    tokens = expected_tokens(acceptance, block_len)
    costs = RoundCosts(STEP_S, STEP_S, block_len * STEP_S / 10, HOP_S)
    break_even_s = break_even_draft_s(tokens, costs)
    usual = _run(acceptance, block_len, costs.draft_s)
    there = _run(acceptance, block_len, break_even_s)
    assert usual.tokens_per_block is not None, "nothing was drafted"
    return Lesson(
        acceptance,
        block_len,
        tokens,
        usual.tokens_per_block,
        speed_up(tokens, costs.draft_s + costs.verify_s + 2 * HOP_S, STEP_S),
        usual.tokens_per_s / non_speculative_rate,
        break_even_s,
        there.tokens_per_s / non_speculative_rate,
    )


def _run(acceptance: float, block_len: int, draft_s: float) -> SimulationReport:
    costs = CostModel(
        target=ForwardCost.linear(STEP_S),
        draft=DraftCost(forward=ForwardCost.linear(0.0), per_pass_s=draft_s),
        hop_s=HOP_S,
    )
    return World(Setting(costs, SpeculationSetting(block_len, DraftQuality((acceptance,)), Mode.LOCK_STEP), LOAD)).run()


SHOWN = 8  # number of best candidates in the table
GROWS = "grows"  # shown for a latency that grows without bound


def run_plan(question: PlanQuestion, console: Console, json_path: Path | None, picture_path: Path | None) -> None:
    """Simulates candidates, shows the advice, and writes the requested files. A picture needs every candidate."""
    if picture_path is not None:
        require_matplotlib()
    with processes() as pool, _progress(console) as progress:
        whole = picture_path is not None
        bar = progress.add_task("Fleets simulated", total=run_count(question, whole))
        advice = advise(question, Watched(pool, lambda: progress.advance(bar)), whole)
    console.print(advice_report(question, advice))
    if json_path is not None:
        json_path.write_text(json.dumps(advice_data(question, advice), indent=1) + "\n", encoding="utf-8")
    if picture_path is not None:
        picture_path.write_text(svg(advice_chart(question, advice)), encoding="utf-8")


def run_theory(console: Console) -> None:
    """Compares formula and simulation for every lesson."""
    with _progress(console) as progress:
        bar = progress.add_task("Lessons", total=len(ACCEPTANCES) * len(BLOCK_LENS))
        found = lessons(lambda: progress.advance(bar))
    console.print(theory_tables(found))


def _progress(console: Console) -> Progress:
    return Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True)


def advice_report(question: PlanQuestion, advice: Advice) -> Group:
    """Renders the recommendation, the comparison, and where the gain ends."""
    limits = [] if advice.limits is None else [_limits_table(advice.limits)]
    by_position = ", ".join(f"{acceptance:.2f}" for acceptance in question.draft.acceptances)
    supposed = f"Acceptance of draft tokens by position: {by_position} ({escape(question.acceptance_is)})"
    return Group(supposed, _candidates_table(question, advice), *limits, verdict(question, advice))


def verdict(question: PlanQuestion, advice: Advice) -> str:
    """Phrases the advice in words."""
    best = advice.best.candidate
    arrivals = question.arrivals
    if isinstance(arrivals, Poisson) and not advice.best.keeps_up:
        rate = f"{arrivals.per_s:g} requests a second on each target, {arrivals.per_s * question.new_tokens:g} tokens/s"
        return f"No fleet keeps up with {rate}: latencies grow for as long as requests come. Ask less of a target."
    if best.block_len == 0:
        return "Take plain decoding: no fleet with drafters does better under this load."
    per = f"{best.drafters} drafter{'s' * (best.drafters > 1)} for {best.targets} target{'s' * (best.targets > 1)}"
    return f"Take {per}, blocks of up to {best.block_len}, {best.name}: {_in_words(question, advice)}."


def _in_words(question: PlanQuestion, advice: Advice) -> str:
    """Phrases the gain of the best candidate."""
    gain = _gain(question, advice.best, advice.plain)
    if not isinstance(question.arrivals, Poisson):
        return f"{gain} the throughput of plain decoding"
    if not advice.plain.keeps_up:
        return "plain decoding does not keep up with this rate"
    return f"{gain} the speed of an answer by plain decoding"


def _gain(question: PlanQuestion, one: PlanAnswer | InProcess, plain: PlanAnswer) -> str:
    """Returns the gain over non-speculative decoding: in throughput, or in latency under a given rate."""
    if not isinstance(question.arrivals, Poisson):
        return f"{one.tokens_per_s / plain.tokens_per_s:.2f}x"
    return f"{plain.latency_s / one.latency_s:.2f}x" if one.keeps_up and plain.keeps_up else shown(None)


def _candidates_table(question: PlanQuestion, advice: Advice) -> Table:
    load = "under the given rate" if isinstance(question.arrivals, Poisson) else "at the given concurrency"
    title = f"Simulated {load}: targets : drafters, longest block, and what one target does"
    made = table(title, "fleet", "K", "mode", "tokens/s", "gain", "latency, s", "busy, %", "cost/1M")
    best_first = sorted(advice.answers, key=lambda one: _rank(question, one))[:SHOWN]
    for answer in dict.fromkeys([advice.best, *best_first, advice.plain]):
        made.add_row(*_row(question, answer, advice.plain), style="bold" if answer is advice.best else None)
    inside = advice.in_process
    made.add_row(
        "1 : 0",
        str(inside.block_len),
        "in-process, by formula",
        shown(inside.tokens_per_s, ".1f"),
        _gain(question, inside, advice.plain),
        _latency(inside),
        "-",
        shown(inside.cost_per_million),
    )
    if isinstance(question.arrivals, Poisson) and not (inside.keeps_up and all(one.keeps_up for one in advice.answers)):
        made.caption = (
            f"{GROWS}: does not keep up. Of the tokens asked for while requests came, less than {KEPT_UP:.0%} were "
            f"committed meanwhile; in-process, more than {CROWD} sessions would run at once."
        )
    return made


def _latency(one: PlanAnswer | InProcess) -> str:
    return shown(one.latency_s) if one.keeps_up else GROWS


def _row(question: PlanQuestion, answer: PlanAnswer, plain: PlanAnswer) -> tuple[str, ...]:
    candidate = answer.candidate
    return (
        f"{candidate.targets} : {candidate.drafters}",
        str(candidate.block_len),
        candidate.name,
        shown(answer.tokens_per_s, ".1f"),
        _gain(question, answer, plain),
        _latency(answer),
        f"{answer.target_busy * 100:.0f} : {answer.drafter_busy * 100:.0f}",
        shown(answer.cost_per_million),
    )


def _rank(question: PlanQuestion, answer: PlanAnswer) -> tuple[bool, float]:
    if isinstance(question.arrivals, Poisson) and answer.keeps_up:
        return False, answer.latency_s
    merit = -answer.tokens_per_s if answer.cost_per_million is None else answer.cost_per_million
    return not answer.keeps_up, merit


def _limits_table(limits: Limits) -> Table:
    candidate = limits.candidate
    of = f"{candidate.targets} : {candidate.drafters}, K = {candidate.block_len}"
    sessions = f"{limits.at_once} session{'s' * (limits.at_once > 1)} at once on a target"
    made = table(f"Where the gain ends in lock-step: {of}, {sessions}", "what", "value")
    enough = limits.acceptance
    made.add_row("least acceptance that pays", "none does" if enough is None else f"{enough:.2f}")
    made.add_row("drafting pass that eats the gain, ms", shown(limits.draft_s * 1e3, ".1f"))
    return made


def advice_data(question: PlanQuestion, advice: Advice) -> dict[str, Any]:
    """Returns everything that was asked and simulated, for JSON."""
    arrivals = {type(question.arrivals).__name__: asdict(question.arrivals)}
    asked = asdict(question) | {"costs": question.costs.model_dump(mode="json"), "arrivals": arrivals}
    inside = asdict(advice.in_process)
    limits = advice.limits
    return {
        "question": asked,
        "answers": [_answer_data(answer) for answer in advice.answers],
        "best": _answer_data(advice.best),
        "in_process": inside,
        "sessions_at_once": advice.at_once,
        "limits": None if limits is None else asdict(limits) | {"candidate": _candidate_data(limits.candidate)},
    }


def _answer_data(answer: PlanAnswer) -> dict[str, Any]:
    return asdict(answer) | {"candidate": _candidate_data(answer.candidate)}


def _candidate_data(candidate: CandidateFleet) -> dict[str, Any]:
    return asdict(candidate) | {"mode": candidate.name}


def advice_chart(question: PlanQuestion, advice: Advice) -> "Figure":
    """Plots speed, or latency under a given rate, over the block length for the recommended fleet.

    A candidate that does not keep up with the rate has no latency; if none keeps up, speed is plotted.
    """
    best = advice.best.candidate
    ratio = (best.targets, best.drafters) if best.block_len else question.ratios[0]
    drawn = [one for one in advice.answers if one.candidate.block_len and one.candidate.fleet == ratio]
    by_latency = isinstance(question.arrivals, Poisson) and any(one.keeps_up for one in drawn)

    def value(answer: PlanAnswer | InProcess) -> float:
        return answer.latency_s if by_latency else answer.tokens_per_s

    lines: dict[str, list[tuple[float, float]]] = {}
    for answer in drawn:
        if answer.keeps_up or not by_latency:
            lines.setdefault(answer.candidate.name, []).append((answer.candidate.block_len, value(answer)))
    rivals: dict[str, PlanAnswer | InProcess] = {"plain": advice.plain, "in the target's process": advice.in_process}
    levels = {name: value(rival) for name, rival in rivals.items() if rival.keeps_up or not by_latency}
    y_title = "latency of a request, s" if by_latency else "tokens/s of one target"
    return line_chart(lines, levels, f"longest block, {ratio[0]} targets : {ratio[1]} drafters", y_title)


# ---------------------------------------------------------------- theory


def theory_tables(lessons: list[Lesson]) -> Group:
    """Renders formula and simulation side by side."""
    tokens = table(
        "Tokens that a verify commits: (1 - g^(K+1)) / (1 - g)", "acceptance g, K", "formula", "simulated", "differs"
    )
    gains = table(
        "Gain over plain decoding in lock-step, and the drafting pass that eats it",
        "acceptance g, K",
        "formula",
        "simulated",
        "eaten at, target steps",
        "simulated there",
    )
    for lesson in lessons:
        name = f"{lesson.acceptance}, {lesson.block_len}"
        differs = lesson.simulated_tokens / lesson.tokens - 1
        tokens.add_row(name, shown(lesson.tokens, ".3f"), shown(lesson.simulated_tokens, ".3f"), f"{differs:+.1%}")
        gains.add_row(
            name,
            f"{lesson.gain:.2f}x",
            f"{lesson.simulated_gain:.2f}x",
            shown(lesson.break_even_steps),
            f"{lesson.gain_there:.2f}x",
        )
    return Group(tokens, gains)
