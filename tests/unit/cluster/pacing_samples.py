"""Values that tests of pacing begin with."""

from collections.abc import Iterable

from cluster.costs import ForwardCost
from cluster.draft_delay import DraftDelay
from cluster.load import Load
from cluster.step_cost import StepCost
from cluster.yields import POSITIONS, Arrivals, Chances, Fleet, Yield

MUCH = 1e6  # blocks: what is known of others does not count any more


def a_delay(measured: Iterable[tuple[int, float]]) -> DraftDelay:
    """After blocks of so many tokens that took so long."""
    delay = DraftDelay()
    for tokens, seconds in measured:
        delay = delay.after(tokens, seconds)
    return delay


STEP = StepCost.profiled(ForwardCost.linear(0.099, per_token_s=0.001))
DRAFT = a_delay([(1, 0.015), (4, 0.030)] * 20)  # 10 ms, and 5 ms a token
LOAD = Load(STEP, sessions=1, gain=1.5)  # 15 tokens/s
NOBODY = Fleet(delay=DRAFT)  # whose blocks say what to expect, but for when they come


def a_yield(*survival: float, delay_s: float = 0.03) -> Yield:
    chances = [*survival, *[0.0] * (POSITIONS - len(survival))]
    whole = (MUCH,) * POSITIONS
    return Yield(Chances(whole, whole, tuple(MUCH * chance for chance in chances)), arrivals=Arrivals(delay_s))
