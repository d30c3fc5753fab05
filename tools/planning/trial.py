"""Simulates candidate fleets, ranks them, and finds the limits of a fleet's gain.

The limits are the lowest acceptance and the longest drafting pass at which speculation still improves throughput.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from cluster.costs import DraftCost, ForwardCost
from tools.planning.estimates import (
    MAX_CONCURRENT,
    NON_SPECULATIVE,
    CandidateFleet,
    PlanInput,
    cost_per_million,
    non_speculative_sessions,
)
from tools.simulation.config import Fleet, Mode, SimulationConfig, Speculation
from tools.simulation.oracle import ClosedLoop, Poisson, Workload
from tools.simulation.world import World

ROUNDS_OF_LOAD = 4  # simulated sessions per concurrent session, at a given concurrency
ROUNDS_OF_ARRIVALS = 8  # simulated sessions per concurrent session, at a given rate (queues grow slowly)
MIN_SESSIONS = 32  # minimum sessions per target, at a given concurrency
MIN_ARRIVALS = 64  # minimum sessions per target, at a given rate
MAX_ARRIVALS = 1024
MAX_EVENTS = 40_000  # simulated events per full run after which no session begins; some seconds of computing time
MAX_SHORT_EVENTS = 20_000  # the same per short run
SHORTER = 4  # ratio of the sessions in full runs and short runs
MIN_SHORT_SESSIONS = 16  # minimum sessions per target in short runs
# Committed tokens per target until the adaptive controllers have settled. Lock step needs no warm-up.
WARM_UP_TOKENS = 3072
WARM_UP_TOKENS_EACH = 768  # the same per concurrent session; few sessions settle sooner
MIN_SHARE_MET = 0.9  # minimum share of requested tokens committed while requests arrive; varies by some percent
PROMISING_SHARE = 0.9  # minimum share of the best merit so far; short runs vary by some percent
EQUAL_MERIT_SHARE = 0.98  # minimum share of the best merit to count as equal; the smaller fleet wins


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Simulated results of one candidate."""

    candidate: CandidateFleet
    tokens_per_s: float  # throughput per target
    latency_s: float  # median over requests
    first_token_s: float
    target_busy: float
    drafter_busy: float
    cost_per_million: float | None
    keeps_up: bool = True  # False: the queue grows under the given rate

    def gain(self, plain: "CandidateResult") -> float:
        return self.tokens_per_s / plain.tokens_per_s


def simulate(inputs: PlanInput, candidate: CandidateFleet) -> CandidateResult:
    """Simulates one candidate."""
    return _simulate(inputs, candidate, sessions_per_target(inputs), MAX_EVENTS)


def _simulate(inputs: PlanInput, candidate: CandidateFleet, sessions: int, max_events: int) -> CandidateResult:
    """Simulates one candidate with `sessions` sessions per target, after a warm-up if its controllers adapt.

    After `max_events` events, no session begins. Computing time grows with the events: fleets of several targets and
    light loads, which rarely share a step, need many. Costs only scale the virtual time.
    """
    adapts = candidate.draft_tokens > 0 and candidate.mode is not Mode.LOCK_STEP
    warm_up = warm_up_sessions(inputs) if adapts else 0
    config = simulation_config(inputs, candidate, warm_up + sessions)
    warm_up_tokens = warm_up * inputs.new_tokens * candidate.targets
    report = World(replace(config, warm_up_tokens=warm_up_tokens, max_events=max_events)).run()
    total = report.tokens_per_s
    return CandidateResult(
        candidate,
        total / candidate.targets,
        report.latency_s,
        report.first_token_s,
        report.target_busy,
        report.drafter_busy,
        cost_per_million(inputs.prices, candidate, total),
        isinstance(inputs.arrivals, ClosedLoop) or report.met >= MIN_SHARE_MET,
    )


def warm_up_sessions(inputs: PlanInput) -> int:
    """Returns the sessions per target whose tokens are a warm-up; at a given concurrency, a multiple of it.

    All sessions are of equal length, so a run that ends within a batch of concurrent sessions is partly idle.
    """
    if isinstance(inputs.arrivals, ClosedLoop):
        concurrency = inputs.arrivals.concurrency
        return math.ceil(_warm_up_tokens(concurrency) / inputs.new_tokens / concurrency) * concurrency
    return math.ceil(_warm_up_tokens(non_speculative_sessions(inputs, inputs.arrivals)) / inputs.new_tokens)


def _warm_up_tokens(concurrency: float) -> int:
    return min(WARM_UP_TOKENS, WARM_UP_TOKENS_EACH * math.ceil(concurrency))


def simulate_briefly(inputs: PlanInput, candidate: CandidateFleet) -> CandidateResult:
    """Simulates one candidate briefly: enough for comparisons, too short to detect a growing queue."""
    sessions = max(MIN_SHORT_SESSIONS, sessions_per_target(inputs) // SHORTER)
    return replace(_simulate(inputs, candidate, sessions, MAX_SHORT_EVENTS), keeps_up=True)


def choose_best(results: Sequence[CandidateResult], inputs: PlanInput) -> CandidateResult:
    """Returns the candidate with the fewest drafters per target among candidates about as good as the best.

    Of equal fleets, prefers the adaptive schedule, whose advantages the simulator does not show: sessions that differ
    in acceptance, and costs that change.
    """
    merit = merit_function(results, inputs)
    enough = EQUAL_MERIT_SHARE * max(map(merit, results))
    good = [one for one in results if merit(one) >= enough]

    def preference(one: CandidateResult) -> tuple[float, bool, float]:
        return one.candidate.drafters_per_target, one.candidate.mode is Mode.LOCK_STEP, -merit(one)

    return min(good, key=preference)


def merit_function(results: Sequence[CandidateResult], inputs: PlanInput) -> Callable[[CandidateResult], float]:
    """Returns the merit function for these results: low cost if prices are known, else speed.

    Without prices, candidates that keep up with a given rate are compared by latency. Other latencies only reflect the
    simulated time. If no candidate keeps up, all are compared as at a given concurrency.
    """
    any_keeps_up = any(one.keeps_up for one in results)

    def merit(one: CandidateResult) -> float:
        if any_keeps_up and not one.keeps_up:
            return 0.0
        if one.cost_per_million is not None:
            return 1 / one.cost_per_million if one.cost_per_million else math.inf
        if any_keeps_up and isinstance(inputs.arrivals, Poisson):
            return 1 / one.latency_s
        return one.tokens_per_s

    return merit


def is_promising(candidate: CandidateFleet, results: Sequence[CandidateResult], inputs: PlanInput) -> bool:
    """Returns whether a candidate may be best, given results with more drafters, which are at least as fast."""
    with_more_drafters = [one for one in results if one.candidate.has_more_drafters_than(candidate)]
    if not with_more_drafters:
        return True
    merit = merit_function(results, inputs)
    best_possible = max(merit(_with_fleet(one, candidate, inputs)) for one in with_more_drafters)
    return best_possible >= PROMISING_SHARE * max(map(merit, results))


def _with_fleet(one: CandidateResult, candidate: CandidateFleet, inputs: PlanInput) -> CandidateResult:
    """Returns the result of another fleet with equal speed per target."""
    cost = cost_per_million(inputs.prices, candidate, one.tokens_per_s * candidate.targets)
    return replace(one, candidate=candidate, cost_per_million=cost)


def simulation_config(inputs: PlanInput, candidate: CandidateFleet, sessions: int) -> SimulationConfig:
    """Returns the simulation's configuration for a candidate with `sessions` sessions per target."""
    load = Workload(
        _arrivals(inputs.arrivals, candidate.targets),
        candidate.targets * sessions,  # equal durations for any number of targets
        inputs.prompt_tokens,
        inputs.new_tokens,
    )
    return SimulationConfig(
        inputs.costs,
        Speculation(candidate.draft_tokens, inputs.draft, candidate.mode),
        load,
        unlimited_fleet(candidate.targets, candidate.drafters, load),
        seed=inputs.seed,
    )


def sessions_per_target(inputs: PlanInput) -> int:
    """Returns the number of sessions to simulate per target, the same for all fleets."""
    if isinstance(inputs.arrivals, ClosedLoop):
        return max(MIN_SESSIONS, ROUNDS_OF_LOAD * inputs.arrivals.concurrency)
    at_once = non_speculative_sessions(inputs, inputs.arrivals)
    if at_once >= MAX_CONCURRENT:
        at_once = MIN_SESSIONS  # few sessions suffice to show that the target does not keep up
    return min(max(MIN_ARRIVALS, round(ROUNDS_OF_ARRIVALS * at_once)), MAX_ARRIVALS)


def unlimited_fleet(targets: int, drafters: int, load: Workload) -> Fleet:
    """Returns a fleet with room for the whole load, so that only costs matter."""
    fleet = Fleet(targets, drafters, sessions_per_target=load.sessions, sessions_per_drafter=load.sessions)
    pages = load.sessions * (-(-(load.prompt_tokens + load.new_tokens) // fleet.page_size) + 1)
    return Fleet(targets, drafters, 1, load.sessions, load.sessions, fleet.step_tokens, pages)


def _arrivals(per_target: ClosedLoop | Poisson, targets: int) -> ClosedLoop | Poisson:
    if isinstance(per_target, ClosedLoop):
        return ClosedLoop(per_target.concurrency * targets)
    return Poisson(per_target.per_s * targets)


LIMIT_SEARCHES = 2
MAX_RUNS = 7  # maximum simulations per search
PRECISION = 0.01  # share of the search interval


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a fleet's gain."""

    candidate: CandidateFleet  # simulated in lock step
    at_once: int  # concurrent sessions per target
    acceptance: float | None  # lowest acceptance with a gain; None if none suffices
    draft_s: float  # duration of a drafting pass that cancels the gain; 0 if verification alone cancels it


def lock_step_candidate(best: CandidateFleet, inputs: PlanInput) -> CandidateFleet:
    """Returns the same fleet in lock step; if it has no drafters, one target with one drafter."""
    targets, drafters = best.fleet if best.draft_tokens else (1, 1)
    return CandidateFleet(targets, drafters, best.draft_tokens or max(inputs.draft_lengths), Mode.LOCK_STEP)


def limits(inputs: PlanInput, candidate: CandidateFleet, at_once: float, pool: Executor) -> Limits:
    """Finds the limits of a fleet in lock step at `at_once` sessions per target; runs both searches in parallel."""
    sessions = max(1, round(at_once))
    asked = replace(inputs, arrivals=ClosedLoop(sessions))
    plain = simulate(asked, NON_SPECULATIVE)
    acceptance = pool.submit(least_acceptance, asked, candidate, plain)
    draft_s = pool.submit(longest_draft_s, asked, candidate, plain, sessions)
    return Limits(candidate, sessions, acceptance.result(), draft_s.result())


def least_acceptance(inputs: PlanInput, candidate: CandidateFleet, plain: CandidateResult) -> float | None:
    """Returns the lowest acceptance (equal for all tokens) at which the fleet gains, or None if none suffices."""

    def saved(acceptance: float) -> float:
        draft = replace(inputs.draft, acceptances=(acceptance,))
        return _saving(replace(inputs, draft=draft), candidate, plain)

    least = Point(0.0, saved(0.0))
    if least.value > 0:
        return least.at
    most = Point(1.0, saved(1.0))
    return crossing(saved, least, most) if most.value > 0 else None


def longest_draft_s(inputs: PlanInput, candidate: CandidateFleet, plain: CandidateResult, sessions: int) -> float:
    """Returns the duration of a drafting pass that cancels the gain, in seconds; 0 if verification alone cancels it."""

    def saved(seconds: float) -> float:
        draft = DraftCost(forward=ForwardCost.linear(0.0), per_pass_s=seconds)
        return _saving(replace(inputs, costs=inputs.costs.model_copy(update={"draft": draft})), candidate, plain)

    shortest = Point(0.0, saved(0.0))
    if shortest.value <= 0:
        return shortest.at
    longest_s = (candidate.draft_tokens + 1) * inputs.costs.non_speculative_s(
        sessions
    )  # a longer pass cancels the gain even if all drafts are accepted
    return crossing(saved, shortest, Point(longest_s, saved(longest_s)))


def _saving(inputs: PlanInput, candidate: CandidateFleet, plain: CandidateResult) -> float:
    """Returns the share of time saved relative to non-speculative decoding; negative if slower.

    Unlike the gain, this share is nearly linear in the searched quantity.
    """
    return 1 - 1 / simulate(inputs, candidate).gain(plain)


@dataclass(frozen=True, slots=True)
class Point:
    """Point of a function's graph."""

    at: float
    value: float


def crossing(function: Callable[[float], float], left: Point, right: Point) -> float:
    """Finds the zero of a function between two points of opposite sign, by the Illinois variant of regula falsi."""
    precision = PRECISION * (right.at - left.at)
    found = math.nan
    for _ in range(MAX_RUNS):
        before = found
        found = (left.at * right.value - right.at * left.value) / (right.value - left.value)
        if abs(found - before) < precision:
            break
        middle = Point(found, function(found))
        if (middle.value > 0) == (left.value > 0):
            right = Point(right.at, right.value / 2) if before == left.at else right
            left = middle
        else:
            left = Point(left.at, left.value / 2) if before == right.at else left
            right = middle
    return found
