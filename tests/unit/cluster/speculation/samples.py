"""Loads, delays and values of drafts for tests of speculation control."""

import math
from collections.abc import Iterable

from cluster.costs import ForwardCost
from cluster.speculation.estimators import DraftValue, Load, Pairs, StepCost


def a_delay(measured: Iterable[tuple[int, float]]) -> Pairs:
    """Returns the delay estimate after blocks of these (tokens, seconds)."""
    delay = Pairs()
    for tokens, seconds in measured:
        delay = delay.after(tokens, seconds, memory=0.01)
    return delay


STEP = StepCost(ForwardCost.linear(0.099, per_token_s=0.001))
DRAFT = a_delay([(1, 0.015), (4, 0.030)] * 20)  # 10 ms plus 5 ms per token
USUAL = (0.9, 0.8, 0.7, 0.6)  # acceptance rates of the first nodes
LOAD = Load(STEP, sessions=1, gain=1.5, accepted=USUAL, delay=DRAFT)  # 10 tokens/s, or 15 with speculation


def a_value(chance: float, usual: float = USUAL[0]) -> DraftValue:
    """Returns the value of drafts whose first node is accepted with this probability, `usual` in other sessions."""
    return DraftValue(math.log(chance / (1 - chance) * (1 - usual) / usual))


def drafting() -> DraftValue:
    """Returns the value of an attached drafter that has answered."""
    return DraftValue(has_drafted=True, is_attached=True)
