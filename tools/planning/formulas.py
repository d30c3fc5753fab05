"""Formulas for a load: steady states, and drafting inside the target's own process without overhead."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.costs import CostModel
from tools.planning.expectation import RoundCosts, expected_tokens_by_position, in_process
from tools.planning.question import PLAIN, PlanQuestion, cost_per_million
from tools.simulation.workload import ClosedLoop, Poisson

CROWD = 4096  # a target with more concurrent sessions than this does not keep up


@dataclass(frozen=True, slots=True)
class InProcess:
    """Result of the formula for drafting on the target's own device."""

    block_len: int
    tokens_per_s: float
    latency_s: float
    cost_per_million: float | None
    keeps_up: bool = True


def round_costs(costs: CostModel, rows: float, block_len: int) -> RoundCosts:
    """Returns the costs of a round of `rows` sessions if one drafter drafts for all of them."""
    return RoundCosts(
        plain_s=costs.plain_s(rows),
        verify_s=costs.target.seconds(rows, rows * (block_len + 1)),
        draft_s=costs.draft.seconds(rows, block_len),
        hop_s=costs.hop_s,
    )


def expected(question: PlanQuestion, block_len: int) -> float:
    """Returns the mean tokens that verifying a block of this length commits."""
    return expected_tokens_by_position([question.draft.chances(index)[0] for index in range(block_len)])


def plain_sessions(question: PlanQuestion, arrivals: Poisson) -> float:
    """Returns the concurrent sessions on one target without speculation, whose steps also feed prompts.

    CROWD means too many.
    """
    fed = 1 + question.prompt_tokens / question.new_tokens  # tokens fed per decided token
    costs = question.costs

    def step_s(rows: float) -> float:
        return costs.plain_s(rows) + costs.target.seconds(rows, rows * fed) - costs.target.seconds(rows, rows)

    return steady_sessions(arrivals.per_s * question.new_tokens, lambda rows: 1 / step_s(rows))


def best_in_process(question: PlanQuestion) -> InProcess:
    """Picks the block length with the least latency for in-process drafting."""
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
    """Returns the concurrent sessions at a demand of `tokens_per_s`, by Little's law; at most CROWD.

    `session_rate` returns the tokens per second of one session among n concurrent ones.
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
