"""Inputs of the planner, and closed formulas for the gain of speculation.

The formulas assume an equal, independent acceptance probability for all draft tokens (Leviathan et al. 2023, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318). They ignore queues. They also estimate drafting inside the target's
process, which Slipstream does not implement; the estimate has no overhead and is thus an upper bound.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from cluster.costs import CostModel
from tools.simulation.config import Mode
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson

DRAFT_LENGTHS = (2, 3, 5, 8)
RATIOS = ((4, 1), (2, 1), (1, 1), (1, 2))  # (targets, drafters)
MODES = (Mode.LOCK_STEP, Mode.ADAPTIVE)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per replica and hour."""

    target: float
    drafter: float


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Load per target replica, and costs."""

    costs: CostModel
    draft: DraftQuality
    arrivals: ClosedLoop | Poisson
    prompt_tokens: int = 64
    new_tokens: int = 64
    prices: Prices | None = None
    draft_lengths: tuple[int, ...] = DRAFT_LENGTHS
    ratios: tuple[tuple[int, int], ...] = RATIOS
    seed: int = 0
    acceptance_source: str = "given"  # source of the acceptance in `draft`


@dataclass(frozen=True, slots=True)
class CandidateFleet:
    """Fleet with its mode of speculation."""

    targets: int
    drafters: int
    draft_tokens: int
    mode: Mode

    @property
    def name(self) -> str:
        return self.mode.value if self.draft_tokens else "plain"

    @property
    def fleet(self) -> tuple[int, int]:
        """Returns the numbers of targets and drafters."""
        return self.targets, self.drafters

    @property
    def drafters_per_target(self) -> float:
        return self.drafters / self.targets

    def has_more_drafters_than(self, other: "CandidateFleet") -> bool:
        """Returns whether it has more drafters per target than `other`, with the same speculation."""
        has_same_speculation = (self.draft_tokens, self.mode) == (other.draft_tokens, other.mode)
        return has_same_speculation and self.drafters_per_target > other.drafters_per_target


NON_SPECULATIVE = CandidateFleet(1, 0, 0, Mode.NO_LOOKAHEAD)


def candidates(inputs: PlanInput) -> Iterator[CandidateFleet]:
    """Yields non-speculative decoding, then all speculating candidates."""
    yield NON_SPECULATIVE
    for (targets, drafters), draft_tokens, mode in product(inputs.ratios, inputs.draft_lengths, MODES):
        yield CandidateFleet(targets, drafters, draft_tokens, mode)


def cost_per_million(prices: Prices | None, candidate: CandidateFleet, tokens_per_s: float) -> float | None:
    """Returns the whole fleet's cost per million tokens, or None without prices."""
    if prices is None:
        return None
    per_s = (candidate.targets * prices.target + candidate.drafters * prices.drafter) / 3600
    return 1e6 * per_s / tokens_per_s


def expected_tokens(acceptance: float, draft_tokens: int) -> float:
    """Returns the mean tokens committed per verified block, (1 - g^(K+1)) / (1 - g), including the target's own token.

    Equation 1 of Leviathan et al., for blocks of K tokens with acceptance probability g.
    """
    if acceptance == 1.0:
        return draft_tokens + 1.0
    return (1 - math.pow(acceptance, draft_tokens + 1)) / (1 - acceptance)


def expected_tokens_by_position(acceptances: Sequence[float]) -> float:
    """Returns the mean tokens committed per block; acceptances are by position, given acceptance of earlier tokens."""
    return 1.0 + sum(accumulate(acceptances, lambda reached, this: reached * this))


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Costs of one round with a constant batch, in seconds."""

    non_speculative_s: float  # target step without drafts
    verify_s: float  # target step over blocks
    draft_s: float  # drafting pass for those blocks
    hop_s: float = 0.0  # one-way latency between drafter and target


def lock_step(costs: RoundCosts) -> float:
    """Returns the seconds per round if drafting, sending, verifying and the verdict's return run in sequence."""
    return costs.draft_s + costs.verify_s + 2 * costs.hop_s


def in_process(costs: RoundCosts) -> float:
    """Returns the seconds per round if the target's own device drafts, then verifies.

    Assumes no message latency and no overlap; `draft_s` is the cost of a drafting pass on that device.
    """
    return costs.draft_s + costs.verify_s


def speed_up(tokens: float, round_s: float, non_speculative_s: float) -> float:
    """Returns the throughput relative to non-speculative decoding at one token per `non_speculative_s`."""
    return tokens * non_speculative_s / round_s


def break_even_draft_s(tokens: float, costs: RoundCosts) -> float:
    """Returns the drafting time, in seconds, that cancels the gain of `tokens` per round in lock step.

    Returns 0 if verification alone cancels the gain.
    """
    return max(0.0, tokens * costs.non_speculative_s - costs.verify_s - 2 * costs.hop_s)


MAX_CONCURRENT = 4096  # above it, a target does not keep up


@dataclass(frozen=True, slots=True)
class InProcessResult:
    """Estimate for drafting on the target's own device."""

    draft_tokens: int
    tokens_per_s: float
    latency_s: float
    cost_per_million: float | None
    keeps_up: bool = True


def round_costs(costs: CostModel, rows: float, draft_tokens: int) -> RoundCosts:
    """Returns the costs of a round with `rows` sessions and one drafter."""
    return RoundCosts(
        non_speculative_s=costs.non_speculative_s(rows),
        verify_s=costs.step_s(rows, rows * (draft_tokens + 1)),
        draft_s=costs.draft.seconds(rows, draft_tokens),
        hop_s=costs.hop_s,
    )


def expected(inputs: PlanInput, draft_tokens: int) -> float:
    """Returns the mean tokens committed per block of `draft_tokens`."""
    return expected_tokens_by_position([inputs.draft.chances(index)[0] for index in range(draft_tokens)])


def non_speculative_sessions(inputs: PlanInput, arrivals: Poisson) -> float:
    """Returns the concurrent sessions on one target without speculation, including the cost of prompts.

    Returns MAX_CONCURRENT if the target does not keep up.
    """
    fed = 1 + inputs.prompt_tokens / inputs.new_tokens  # fed tokens per committed token
    costs = inputs.costs

    def step_s(rows: float) -> float:
        return costs.non_speculative_s(rows) + costs.target.seconds(rows, rows * fed) - costs.target.seconds(rows, rows)

    return steady_sessions(arrivals.per_s * inputs.new_tokens, lambda rows: 1 / step_s(rows))


def best_in_process(inputs: PlanInput) -> InProcessResult:
    """Returns the in-process estimate for the draft length with the lowest latency."""
    return min(
        (_in_process(inputs, draft_tokens) for draft_tokens in inputs.draft_lengths), key=lambda one: one.latency_s
    )


def _in_process(inputs: PlanInput, draft_tokens: int) -> InProcessResult:
    tokens = expected(inputs, draft_tokens)

    def round_s(rows: float) -> float:
        return in_process(round_costs(inputs.costs, rows, draft_tokens))

    if isinstance(inputs.arrivals, ClosedLoop):
        rows = float(inputs.arrivals.concurrency)
    else:
        rows = steady_sessions(inputs.arrivals.per_s * inputs.new_tokens, lambda n: tokens / round_s(n))
    tokens_per_s = rows * tokens / round_s(rows)
    latency_s = inputs.new_tokens * round_s(rows) / tokens
    cost = cost_per_million(inputs.prices, NON_SPECULATIVE, tokens_per_s)
    return InProcessResult(draft_tokens, tokens_per_s, latency_s, cost, keeps_up=rows < MAX_CONCURRENT)


def steady_sessions(tokens_per_s: float, session_rate: Callable[[float], float]) -> float:
    """Returns the concurrent sessions at a demand of `tokens_per_s`, by Little's law; at most MAX_CONCURRENT.

    `session_rate` returns the tokens per second of each of n concurrent sessions.
    """
    low = 0.0
    high = float(MAX_CONCURRENT)
    while high - low > 1e-6 * MAX_CONCURRENT:
        middle = (low + high) / 2
        if middle * session_rate(middle) < tokens_per_s:
            low = middle
        else:
            high = middle
    return high
