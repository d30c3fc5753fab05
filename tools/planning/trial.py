"""One candidate fleet under the load that was asked about, by simulation, and which candidate is best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tools.planning.formulas import CROWD, plain_sessions
from tools.planning.question import CandidateFleet, PlanQuestion, cost_per_million
from tools.simulation.setting import Fleet, Setting, SpeculationSetting
from tools.simulation.workload import ClosedLoop, Poisson, Workload
from tools.simulation.world import World

ROUNDS_OF_LOAD = 4  # sessions simulated for each that runs at once
ROUNDS_OF_ARRIVALS = 8  # the same under a given rate, where it takes longer to see whether what waits grows
FEWEST_SESSIONS = 32  # simulated for one target
FEWEST_ARRIVALS = 64  # the same under a given rate
MOST_ARRIVALS = 1024
SHORTER = 4  # times fewer sessions in the short runs that say which fleets are worth a whole one
FEWEST_SHORT = 16  # simulated for one target in those
KEPT_UP = 0.9  # of the tokens asked for while requests come, committed meanwhile; luck takes a few percent
PROMISING = 0.9  # of the best so far: luck takes some percent of the shorter runs
AS_GOOD = 0.98  # candidates within this of the best are as good; the smaller fleet is then the better


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What a candidate came to."""

    candidate: CandidateFleet
    tokens_per_s: float  # of one target
    latency_s: float  # of a request, median
    first_token_s: float
    target_busy: float
    drafter_busy: float
    cost_per_million: float | None
    keeps_up: bool = True  # under a given rate: what waits does not grow for as long as requests come

    def gain(self, plain: "PlanAnswer") -> float:
        return self.tokens_per_s / plain.tokens_per_s


def answer(question: PlanQuestion, candidate: CandidateFleet) -> PlanAnswer:
    """Simulates one candidate."""
    return _simulated(question, candidate, sessions_of_one(question))


def _simulated(question: PlanQuestion, candidate: CandidateFleet, sessions: int) -> PlanAnswer:
    """With so many sessions for each target."""
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
    """Simulates one candidate for a short time: enough to compare, too short to see whether what waits grows."""
    sessions = max(FEWEST_SHORT, sessions_of_one(question) // SHORTER)
    return replace(_simulated(question, candidate, sessions), keeps_up=True)


def choose(answers: Sequence[PlanAnswer], question: PlanQuestion) -> PlanAnswer:
    """Of those about as good as the best, the smallest fleet."""
    merit = merit_among(answers, question)
    enough = AS_GOOD * max(map(merit, answers))
    good = [one for one in answers if merit(one) >= enough]
    return min(good, key=lambda one: (one.candidate.drafters / one.candidate.targets, -merit(one)))


def merit_among(answers: Sequence[PlanAnswer], question: PlanQuestion) -> Callable[[PlanAnswer], float]:
    """What these answers are compared by: the cheapest is best where prices are known, else the fastest.

    Under a given rate, of those that keep up with it, the one with the least latency. That of the others tells only
    how long they were watched; if there are no others, they are compared as at a given concurrency.
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
    """Whether it may be best, by what came of the same with more drafters: with fewer it is no faster."""
    roomier = [one for one in answers if one.candidate.is_roomier_than(candidate)]
    if not roomier:
        return True
    merit = merit_among(answers, question)
    hoped = max(merit(_with_fleet(one, candidate, question)) for one in roomier)
    return hoped >= PROMISING * max(map(merit, answers))


def _with_fleet(one: PlanAnswer, candidate: CandidateFleet, question: PlanQuestion) -> PlanAnswer:
    """The same speed from another fleet."""
    cost = cost_per_million(question.prices, candidate, one.tokens_per_s * candidate.targets)
    return replace(one, candidate=candidate, cost_per_million=cost)


def setting(question: PlanQuestion, candidate: CandidateFleet, sessions: int) -> Setting:
    """The simulated run that tries a candidate, with so many sessions for each target."""
    load = Workload(
        _arrivals(question.arrivals, candidate.targets),
        candidate.targets * sessions,  # requests come for as long, however many targets there are
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
    """Sessions simulated for each target: the same for all fleets."""
    if isinstance(question.arrivals, ClosedLoop):
        return max(FEWEST_SESSIONS, ROUNDS_OF_LOAD * question.arrivals.concurrency)
    at_once = plain_sessions(question, question.arrivals)
    if at_once >= CROWD:
        at_once = FEWEST_SESSIONS  # it does not keep up, which shows soon
    return min(max(FEWEST_ARRIVALS, round(ROUNDS_OF_ARRIVALS * at_once)), MOST_ARRIVALS)


def roomy_fleet(targets: int, drafters: int, load: Workload) -> Fleet:
    """Replicas that hold all of the load, so that costs alone decide."""
    fleet = Fleet(targets, drafters, sessions_per_target=load.sessions, sessions_per_drafter=load.sessions)
    pages = load.sessions * (-(-(load.prompt_tokens + load.new_tokens) // fleet.page_size) + 1)
    return Fleet(targets, drafters, 1, load.sessions, load.sessions, fleet.step_tokens, pages)


def _arrivals(of_one: ClosedLoop | Poisson, targets: int) -> ClosedLoop | Poisson:
    if isinstance(of_one, ClosedLoop):
        return ClosedLoop(of_one.concurrency * targets)
    return Poisson(of_one.per_s * targets)
