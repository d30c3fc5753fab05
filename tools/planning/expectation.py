"""Mean gain of speculation in closed form.

Every draft token is accepted with the same probability, independent of what came before (Leviathan et al. 2023, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318). Pure arithmetic without queues, loads or the simulator, which applies
where these formulas end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

PRECISION = 1e-9  # of bisection


def expected_tokens(acceptance: float, block_len: int) -> float:
    """Mean tokens that verifying a block commits: (1 - g^(K+1)) / (1 - g), with the recovered or bonus token.

    Leviathan et al., equation 1, for acceptance g of every draft token and blocks of K tokens.
    """
    if acceptance == 1.0:
        return block_len + 1.0
    return (1 - math.pow(acceptance, block_len + 1)) / (1 - acceptance)


def expected_tokens_by_position(acceptances: Sequence[float]) -> float:
    """Mean tokens per block if the k-th draft token has its own acceptance, given those before it."""
    return 1.0 + sum(accumulate(acceptances, lambda reached, this: reached * this))


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Costs of one round for an unchanging batch."""

    plain_s: float  # a target step without drafts
    verify_s: float  # a target step over blocks
    draft_s: float  # a drafting pass for those blocks
    hop_s: float = 0.0  # one way between drafter and target


RoundTime = Callable[[RoundCosts], float]
"""Seconds from one verification to the next."""


def lock_step(costs: RoundCosts) -> float:
    """Returns the time of a round that drafts, sends, verifies and sends the verdict in sequence."""
    return costs.draft_s + costs.verify_s + 2 * costs.hop_s


def in_process(costs: RoundCosts) -> float:
    """Returns the time of a round that drafts and verifies alternately on the target's own device.

    There is no hop and no overlap; `draft_s` is the cost of a pass on that device.
    """
    return costs.draft_s + costs.verify_s


def draft_ahead(costs: RoundCosts) -> float:
    """Returns the time of a round with perfect guesses: drafting and network overlap with verification."""
    return max(costs.verify_s, costs.draft_s)


def speed_up(tokens: float, round_s: float, plain_s: float) -> float:
    """Returns the throughput relative to non-speculative decoding, which yields one token per `plain_s`."""
    return tokens * plain_s / round_s


def break_even_draft_s(tokens: float, costs: RoundCosts, round_time: RoundTime = lock_step) -> float:
    """Returns the drafting time that cancels the gain of committing `tokens` per round.

    0 if verification alone costs as much as it gains. It is always finite, because a round takes at least as long as
    its draft.
    """
    worth = tokens * costs.plain_s

    def too_long(draft_s: float) -> bool:
        return round_time(replace(costs, draft_s=draft_s)) > worth

    return 0.0 if too_long(0.0) else _least(too_long, 0.0, _first_doubled(too_long, worth))


def _first_doubled(holds: Callable[[float], bool], start: float) -> float:
    value = start
    while not holds(value):
        value *= 2
        assert math.isfinite(value), "a condition that must hold somewhere holds nowhere"
    return value


def _least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Returns the least value from which on the condition holds, by bisection; it must hold at `high`."""
    if holds(low):
        return low
    while high - low > PRECISION * max(1.0, high):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
