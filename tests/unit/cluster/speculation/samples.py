"""Loads, delays and statistics for tests of speculation control."""

from collections.abc import Iterable

from cluster.costs import ForwardCost
from cluster.speculation.estimators import Chances, Load, Pairs, ReplicaStats, SessionStats, StepCost

MUCH = 1e6  # blocks; enough that other sessions do not count
NODES = 16  # of the longest block


def a_delay(measured: Iterable[tuple[int, float]]) -> Pairs:
    """Returns the delay estimate after blocks of these (tokens, seconds)."""
    delay = Pairs()
    for tokens, seconds in measured:
        delay = delay.after(tokens, seconds, memory=0.01)
    return delay


STEP = StepCost.profiled(ForwardCost.linear(0.099, per_token_s=0.001))
DRAFT = a_delay([(1, 0.015), (4, 0.030)] * 20)  # 10 ms plus 5 ms per token
LOAD = Load(STEP, sessions=1, gain=1.5)  # 15 tokens/s
NOBODY = ReplicaStats(delay=DRAFT)  # only delays, without other sessions' blocks


def a_yield(*p_accepted: float, delay_s: float = 0.03) -> SessionStats:
    chances = [*p_accepted, *[0.0] * (NODES - len(p_accepted))]
    whole = (MUCH,) * NODES
    return SessionStats(Chances(whole, whole, tuple(MUCH * chance for chance in chances)), delay_s=delay_s)
