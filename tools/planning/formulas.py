"""What formulas say of a load: steady states, and drafting inside the target's own process, without any overhead."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.costs import CostModel
from tools.planning.expectation import RoundCosts, expected_tokens_by_position, in_process
from tools.planning.question import PLAIN, PlanQuestion, cost_per_million
from tools.simulation.workload import ClosedLoop, Poisson

CROWD = 4096  # more sessions at once than this on one target: it does not keep up


@dataclass(frozen=True, slots=True)
class InProcess:
    """Drafting on the target's own device, by the formula."""

    block_len: int
    tokens_per_s: float
    latency_s: float
    cost_per_million: float | None
    keeps_up: bool = True


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
    return expected_tokens_by_position([question.draft.chances(index)[0] for index in range(block_len)])


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
