"""Which fleet serves a load best: simulates candidates under given costs and compares them.

Every candidate, plain decoding among them, runs through the simulator, with the real schedulers and pacing. Drafting
inside the target's own process is no part of Slipstream and comes from the formula, without any overhead: the strongest
form of what it is compared with.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.planning.expectation import RoundCosts, expected_tokens_by_position, in_process
from cluster.simulation.oracle import DraftQuality
from cluster.simulation.setting import Fleet, Mode, Setting, SpeculationSetting
from cluster.simulation.workload import ClosedLoop, Poisson, Workload
from cluster.simulation.world import World

BLOCK_LENS = (2, 3, 5, 8)
RATIOS = ((4, 1), (2, 1), (1, 1), (1, 2))  # targets and drafters
ROUNDS_OF_LOAD = 4  # sessions simulated for each that runs at once
ROUNDS_OF_ARRIVALS = 8  # the same under a given rate, where it takes longer to see whether what waits grows
FEWEST_SESSIONS = 32  # simulated for one target
FEWEST_ARRIVALS = 64  # the same under a given rate
MOST_ARRIVALS = 1024
KEPT_UP = 0.9  # of the tokens asked for while requests come, committed meanwhile; luck takes a few percent
AS_GOOD = 0.98  # candidates within this of the best are as good; the smaller fleet is then the better
HALVINGS = 7  # until it is known where a gain ends: to about a percent of where it may
CROWD = 4096  # more sessions at once than this on one target: it does not keep up


@dataclass(frozen=True, slots=True)
class Prices:
    """For an hour of one replica."""

    target: float
    drafter: float


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What is to be served, at what costs. Workload is that of one target replica."""

    costs: CostModel
    draft: DraftQuality
    arrivals: ClosedLoop | Poisson
    prompt_tokens: int = 64
    new_tokens: int = 64
    prices: Prices | None = None
    block_lens: tuple[int, ...] = BLOCK_LENS
    ratios: tuple[tuple[int, int], ...] = RATIOS
    seed: int = 0
    acceptance_is: str = "given"  # where that of `draft` comes from


@dataclass(frozen=True, slots=True)
class CandidateFleet:
    """A fleet, and how it speculates."""

    targets: int
    drafters: int
    block_len: int
    mode: Mode

    @property
    def name(self) -> str:
        return self.mode.value if self.block_len else "plain"

    @property
    def fleet(self) -> tuple[int, int]:
        """Targets and drafters."""
        return self.targets, self.drafters


PLAIN = CandidateFleet(1, 0, 0, Mode.ADAPTIVE)


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


@dataclass(frozen=True, slots=True)
class InProcess:
    """Drafting on the target's own device, by the formula."""

    block_len: int
    tokens_per_s: float
    latency_s: float
    cost_per_million: float | None
    keeps_up: bool = True


@dataclass(frozen=True, slots=True)
class Advice:
    """Every candidate, the one to take, and where its gain ends."""

    answers: tuple[PlanAnswer, ...]
    best: PlanAnswer
    plain: PlanAnswer
    in_process: InProcess
    at_once: float  # sessions on one target, under the best candidate
    limits: "Limits | None"  # None where the best does not keep up: there is no such number of sessions


@dataclass(frozen=True, slots=True)
class Limits:
    """Where the gain of a fleet ends."""

    candidate: CandidateFleet  # in lock-step
    at_once: int  # sessions on one target, at all times
    acceptance: float | None  # of every token, from which on it gains; None: no acceptance is enough
    draft_s: float  # drafting pass that eats the gain, over however many sessions; 0 where verification alone does


def candidates(question: PlanQuestion) -> Iterator[CandidateFleet]:
    """Plain decoding, then all that speculates."""
    yield PLAIN
    for (targets, drafters), block_len, mode in product(question.ratios, question.block_lens, Mode):
        yield CandidateFleet(targets, drafters, block_len, mode)


def advise(question: PlanQuestion, advance: Callable[[], None] = lambda: None) -> Advice:
    """Tries every candidate; `advance` is called after each."""
    answers = []
    for candidate in candidates(question):
        answers.append(answer(question, candidate))
        advance()
    best = choose(answers, question)
    at_once = sessions_at_once(question, best)
    return Advice(
        answers=tuple(answers),
        best=best,
        plain=answers[0],
        in_process=best_in_process(question),
        at_once=at_once,
        limits=limits(question, in_lock_step(best.candidate, question), at_once) if best.keeps_up else None,
    )


def answer(question: PlanQuestion, candidate: CandidateFleet) -> PlanAnswer:
    """Simulates one candidate."""
    report = World(setting(question, candidate)).run()
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


def choose(answers: Sequence[PlanAnswer], question: PlanQuestion) -> PlanAnswer:
    """The cheapest where prices are known, else the fastest.

    Under a given rate, of those that keep up with it, the one with the least latency. That of the others tells only
    how long they were watched; if there are no others, they are compared as at a given concurrency.
    """
    able = [one for one in answers if one.keeps_up]

    def merit(one: PlanAnswer) -> float:
        if able and isinstance(question.arrivals, Poisson):
            return 1 / one.latency_s
        return one.tokens_per_s if one.cost_per_million is None else 1 / one.cost_per_million

    enough = AS_GOOD * max(map(merit, able or answers))
    good = [one for one in able or answers if merit(one) >= enough]
    return min(good, key=lambda one: (one.candidate.drafters / one.candidate.targets, -merit(one)))


def setting(question: PlanQuestion, candidate: CandidateFleet) -> Setting:
    """The simulated run that tries a candidate."""
    load = Workload(
        _arrivals(question.arrivals, candidate.targets),
        candidate.targets * sessions_of_one(question),  # requests come for as long, however many targets there are
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


def cost_per_million(prices: Prices | None, candidate: CandidateFleet, tokens_per_s: float) -> float | None:
    """Of tokens, from the fleet as a whole."""
    if prices is None:
        return None
    per_s = (candidate.targets * prices.target + candidate.drafters * prices.drafter) / 3600
    return 1e6 * per_s / tokens_per_s


# ---------------------------------------------------------------- where the gain ends


def in_lock_step(best: CandidateFleet, question: PlanQuestion) -> CandidateFleet:
    """The same fleet; where none drafts, one with a drafter for each target."""
    targets, drafters = best.fleet if best.block_len else (1, 1)
    return CandidateFleet(targets, drafters, best.block_len or max(question.block_lens), Mode.LOCK_STEP)


def limits(question: PlanQuestion, candidate: CandidateFleet, at_once: float) -> Limits:
    """By simulation: targets that share a drafter go out of step, and how they wait for it no simple formula says."""
    sessions = max(1, round(at_once))
    asked = replace(question, arrivals=ClosedLoop(sessions))
    plain = answer(asked, PLAIN)

    def gains(changed: PlanQuestion) -> bool:
        return answer(changed, candidate).gain(plain) > 1.0

    def accepting(acceptance: float) -> PlanQuestion:
        return replace(asked, draft=replace(question.draft, acceptances=(acceptance,)))

    def drafting_for(seconds: float) -> PlanQuestion:
        draft = DraftCost(forward=ForwardCost.linear(0.0), per_pass_s=seconds)
        return replace(asked, costs=question.costs.model_copy(update={"draft": draft}))

    longest_s = (candidate.block_len + 1) * question.costs.plain_s(sessions)  # a round is no shorter than its draft
    acceptance = _least(lambda acceptance: gains(accepting(acceptance)), 1.0) if gains(accepting(1.0)) else None
    draft_s = _least(lambda seconds: not gains(drafting_for(seconds)), longest_s)
    return Limits(candidate, sessions, acceptance, draft_s)


def _least(holds: Callable[[float], bool], high: float) -> float:
    """From where on the condition holds, between 0 and `high`, by bisection; it holds at `high`."""
    low = 0.0
    if holds(low):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return (low + high) / 2


# ---------------------------------------------------------------- by formula


def round_costs(costs: CostModel, rows: float, block_len: int) -> RoundCosts:
    """What a round of `rows` sessions costs when one drafter drafts for all of them."""
    return RoundCosts(
        plain_s=costs.plain_s(rows),
        verify_s=costs.target.seconds(rows, rows * (block_len + 1)),
        draft_s=costs.draft.seconds(rows, block_len),
        hop_s=costs.hop_s,
    )


def expected(question: PlanQuestion, block_len: int) -> float:
    """Tokens that verifying a block of this length commits."""
    return expected_tokens_by_position([question.draft.acceptance(index) for index in range(block_len)])


def plain_sessions(question: PlanQuestion, arrivals: Poisson) -> float:
    """How many run at once on one target that decodes plainly, its steps feeding prompts besides; CROWD: too many."""
    fed = 1 + question.prompt_tokens / question.new_tokens  # tokens of a step for each that it decides
    costs = question.costs

    def step_s(rows: float) -> float:
        return costs.plain_s(rows) + costs.target.seconds(rows, rows * fed) - costs.target.seconds(rows, rows)

    return steady_sessions(arrivals.per_s * question.new_tokens, lambda rows: 1 / step_s(rows))


def best_in_process(question: PlanQuestion) -> InProcess:
    """At its own best block length: as many tokens in less time."""
    return min((_in_process(question, block_len) for block_len in question.block_lens), key=lambda one: one.latency_s)


def _in_process(question: PlanQuestion, block_len: int) -> InProcess:
    tokens = expected(question, block_len)

    def round_s(rows: float) -> float:
        return in_process(round_costs(question.costs, rows, block_len))

    if isinstance(question.arrivals, ClosedLoop):
        rows = float(question.arrivals.concurrency)
    else:
        rows = steady_sessions(question.arrivals.per_s * question.new_tokens, lambda n: tokens / round_s(n))
    tokens_per_s = rows * tokens / round_s(rows)
    latency_s = question.new_tokens * round_s(rows) / tokens
    cost = cost_per_million(question.prices, PLAIN, tokens_per_s)
    return InProcess(block_len, tokens_per_s, latency_s, cost, keeps_up=rows < CROWD)


def steady_sessions(tokens_per_s: float, session_rate: Callable[[float], float]) -> float:
    """How many sessions run at once where so many tokens are asked for, by Little's law; at most CROWD.

    `session_rate` is the tokens a second of one session among so many.
    """
    low = 0.0
    high = float(CROWD)
    while high - low > 1e-6 * CROWD:
        middle = (low + high) / 2
        if middle * session_rate(middle) < tokens_per_s:
            low = middle
        else:
            high = middle
    return high


def sessions_at_once(question: PlanQuestion, best: PlanAnswer) -> float:
    """On one target."""
    if isinstance(question.arrivals, ClosedLoop):
        return float(question.arrivals.concurrency)
    return question.arrivals.per_s * best.latency_s


def _arrivals(of_one: ClosedLoop | Poisson, targets: int) -> ClosedLoop | Poisson:
    if isinstance(of_one, ClosedLoop):
        return ClosedLoop(of_one.concurrency * targets)
    return Poisson(of_one.per_s * targets)
