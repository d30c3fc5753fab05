"""What speculation brings on average, in closed form.

A draft token is accepted with the same probability whatever came before (Leviathan et al. 2023, arXiv 2211.17192;
Chen et al. 2023, arXiv 2302.01318). Pure arithmetic; knows nothing of queues, of loads or of the simulator, which
answers where these formulas end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

PRECISION = 1e-9  # of what is found by bisection


def expected_tokens(acceptance: float, block_len: int) -> float:
    """Mean tokens that verifying a block commits: (1 - g^(K+1)) / (1 - g), with the recovered or bonus token.

    Leviathan et al., equation 1, for acceptance g of every draft token and blocks of K tokens.
    """
    if acceptance == 1.0:
        return block_len + 1.0
    return (1 - math.pow(acceptance, block_len + 1)) / (1 - acceptance)


def expected_tokens_by_position(acceptances: Sequence[float]) -> float:
    """The same where the k-th token of a block is accepted with its own probability, given those before it."""
    return 1.0 + sum(accumulate(acceptances, lambda reached, this: reached * this))


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """What one round costs for a batch that stays the same."""

    plain_s: float  # a target step without drafts
    verify_s: float  # a target step over blocks
    draft_s: float  # a drafting pass for those blocks
    hop_s: float = 0.0  # one way between drafter and target


RoundTime = Callable[[RoundCosts], float]
"""Seconds from one verification to the next."""


def lock_step(costs: RoundCosts) -> float:
    """Draft, send, verify, send the verdict: one after the other."""
    return costs.draft_s + costs.verify_s + 2 * costs.hop_s


def in_process(costs: RoundCosts) -> float:
    """Draft and verify by turns on the target's own device: no hop, and no overlap either.

    `draft_s` is then what a pass costs there.
    """
    return costs.draft_s + costs.verify_s


def draft_ahead(costs: RoundCosts) -> float:
    """Every guess is right: drafting and the network hide behind verification, or it behind them."""
    return max(costs.verify_s, costs.draft_s)


def speed_up(tokens: float, round_s: float, plain_s: float) -> float:
    """How many times the tokens per second of plain decoding, which gives one token each `plain_s`."""
    return tokens * plain_s / round_s


def break_even_draft_s(tokens: float, costs: RoundCosts, round_time: RoundTime = lock_step) -> float:
    """The drafting time that eats the whole gain of committing `tokens` a round.

    0 when verification alone costs as much as it brings. Infinite never: a round is no shorter than its draft.
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
    """The least value from which on the condition holds, by bisection; it holds at `high`."""
    if holds(low):
        return low
    while high - low > PRECISION * max(1.0, high):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
