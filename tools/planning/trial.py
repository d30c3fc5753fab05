"""Simulation of one candidate fleet under the given load, and selection of the best candidate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tools.planning.formulas import CROWD, plain_sessions
from tools.planning.question import CandidateFleet, PlanQuestion, cost_per_million
from tools.simulation.setting import Fleet, Setting, SpeculationSetting
from tools.simulation.workload import ClosedLoop, Poisson, Workload
from tools.simulation.world import World

ROUNDS_OF_LOAD = 4  # simulated sessions per concurrent session
ROUNDS_OF_ARRIVALS = 8  # the same under a given rate, where it takes longer to see whether the queue grows
FEWEST_SESSIONS = 32  # least sessions simulated per target
FEWEST_ARRIVALS = 64  # least sessions per target under a given rate
MOST_ARRIVALS = 1024
SHORTER = 4  # factor of fewer sessions in the short runs that select fleets for full ones
FEWEST_SHORT = 16  # least sessions per target in short runs
KEPT_UP = 0.9  # share of requested tokens committed while requests arrive; noise takes a few percent
PROMISING = 0.9  # of the best so far: short runs are noisier by some percent
AS_GOOD = 0.98  # candidates within this factor of the best count as equal; the smaller fleet wins


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Simulated result of a candidate."""

    candidate: CandidateFleet
    tokens_per_s: float  # per target
    latency_s: float  # median of requests
    first_token_s: float
    target_busy: float
    drafter_busy: float
    cost_per_million: float | None
    keeps_up: bool = True  # under a given rate: the queue does not grow while requests arrive

    def gain(self, plain: "PlanAnswer") -> float:
        return self.tokens_per_s / plain.tokens_per_s


def answer(question: PlanQuestion, candidate: CandidateFleet) -> PlanAnswer:
    """Simulates one candidate."""
    return _simulated(question, candidate, sessions_of_one(question))


def _simulated(question: PlanQuestion, candidate: CandidateFleet, sessions: int) -> PlanAnswer:
    """Simulates one candidate with `sessions` sessions per target."""
    report = World(setting(question, candidate, sessions)).run()
    total = report.tokens_per_s
    return PlanAnswer(
        candidate,
        total / candidate.targets,
        report.latency_s,
        report.first_token_s,
        report.target_busy,
        report.drafter_busy,
        cost_per_million(question.prices, candidate, total),
        isinstance(question.arrivals, ClosedLoop) or report.met >= KEPT_UP,
    )


def sketch(question: PlanQuestion, candidate: CandidateFleet) -> PlanAnswer:
    """Simulates one candidate briefly: long enough to compare, too short to see whether the queue grows."""
    sessions = max(FEWEST_SHORT, sessions_of_one(question) // SHORTER)
    return replace(_simulated(question, candidate, sessions), keeps_up=True)


def choose(answers: Sequence[PlanAnswer], question: PlanQuestion) -> PlanAnswer:
    """Returns the smallest fleet of those about as good as the best."""
    merit = merit_among(answers, question)
    enough = AS_GOOD * max(map(merit, answers))
    good = [one for one in answers if merit(one) >= enough]
    return min(good, key=lambda one: (one.candidate.drafters / one.candidate.targets, -merit(one)))


def merit_among(answers: Sequence[PlanAnswer], question: PlanQuestion) -> Callable[[PlanAnswer], float]:
    """Returns the merit by which these answers are compared: cost if prices are known, else speed.

    Under a given rate, candidates that keep up are compared by latency. The latency of the others shows only how long
    they were simulated; if none keeps up, all are compared as at a given concurrency.
    """
    is_kept_up_with = any(one.keeps_up for one in answers)

    def merit(one: PlanAnswer) -> float:
        if is_kept_up_with and not one.keeps_up:
            return 0.0
        if is_kept_up_with and isinstance(question.arrivals, Poisson):
            return 1 / one.latency_s
        return one.tokens_per_s if one.cost_per_million is None else 1 / one.cost_per_million

    return merit


def is_promising(candidate: CandidateFleet, answers: Sequence[PlanAnswer], question: PlanQuestion) -> bool:
    """Returns whether a candidate may be best, given the same with more drafters: with fewer it is no faster."""
    roomier = [one for one in answers if one.candidate.is_roomier_than(candidate)]
    if not roomier:
        return True
    merit = merit_among(answers, question)
    hoped = max(merit(_with_fleet(one, candidate, question)) for one in roomier)
    return hoped >= PROMISING * max(map(merit, answers))


def _with_fleet(one: PlanAnswer, candidate: CandidateFleet, question: PlanQuestion) -> PlanAnswer:
    """Transfers the same speed to another fleet."""
    cost = cost_per_million(question.prices, candidate, one.tokens_per_s * candidate.targets)
    return replace(one, candidate=candidate, cost_per_million=cost)


def setting(question: PlanQuestion, candidate: CandidateFleet, sessions: int) -> Setting:
    """Returns the simulated run of a candidate, with `sessions` sessions per target."""
    load = Workload(
        _arrivals(question.arrivals, candidate.targets),
        candidate.targets * sessions,  # arrivals last as long for any number of targets
        question.prompt_tokens,
        question.new_tokens,
    )
    return Setting(
        question.costs,
        SpeculationSetting(candidate.block_len, question.draft, candidate.mode),
        load,
        roomy_fleet(candidate.targets, candidate.drafters, load),
        seed=question.seed,
    )


def sessions_of_one(question: PlanQuestion) -> int:
    """Returns the sessions simulated per target, the same for all fleets."""
    if isinstance(question.arrivals, ClosedLoop):
        return max(FEWEST_SESSIONS, ROUNDS_OF_LOAD * question.arrivals.concurrency)
    at_once = plain_sessions(question, question.arrivals)
    if at_once >= CROWD:
        at_once = FEWEST_SESSIONS  # it does not keep up, which shows quickly
    return min(max(FEWEST_ARRIVALS, round(ROUNDS_OF_ARRIVALS * at_once)), MOST_ARRIVALS)


def roomy_fleet(targets: int, drafters: int, load: Workload) -> Fleet:
    """Returns replicas that hold all of the load, so that only costs matter."""
    fleet = Fleet(targets, drafters, sessions_per_target=load.sessions, sessions_per_drafter=load.sessions)
    pages = load.sessions * (-(-(load.prompt_tokens + load.new_tokens) // fleet.page_size) + 1)
    return Fleet(targets, drafters, 1, load.sessions, load.sessions, fleet.step_tokens, pages)


def _arrivals(of_one: ClosedLoop | Poisson, targets: int) -> ClosedLoop | Poisson:
    if isinstance(of_one, ClosedLoop):
        return ClosedLoop(of_one.concurrency * targets)
    return Poisson(of_one.per_s * targets)
