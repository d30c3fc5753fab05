"""Small random systems under random faults; the same seed gives the same run.

Sizes, costs, load, speculation and faults are all drawn, so that thousands of runs reach unforeseen states: full
queues, caches that are too small, drafters faster than the network.
"""

import random

from cluster.costs import CostModel, DraftCost, ForwardCost
from tools.simulation.faults import random_fault_plan
from tools.simulation.oracle import DraftQuality
from tools.simulation.setting import Fleet, Mode, Setting, SpeculationSetting
from tools.simulation.workload import ClosedLoop, Poisson, Workload

LONG = 0.15  # share of scenarios with answers of some seconds


def random_scenario(seed: int) -> Setting:
    """Draws a setting; running it takes some milliseconds."""
    rng = random.Random(f"random_scenario {seed}")
    load = _load(rng)
    return Setting(
        _costs(rng),
        SpeculationSetting(rng.randrange(7), _draft(rng), rng.choice(list(Mode))),
        load,
        _fleet(rng, load),
        random_fault_plan(seed, span_s=1.0),
        seed,
    )


def _draft(rng: random.Random) -> DraftQuality:
    return DraftQuality((rng.uniform(0.3, 1.0),), branches=rng.random() < 0.5)


def _costs(rng: random.Random) -> CostModel:
    return CostModel(
        target=ForwardCost.linear(rng.choice((0.002, 0.02)), per_token_s=rng.choice((0.0, 0.0005))),
        draft=DraftCost(forward=ForwardCost.linear(rng.choice((0.0005, 0.004)))),
        hop_s=rng.choice((0.0, 0.0003, 0.01)),
    )


def _load(rng: random.Random) -> Workload:
    arrivals = ClosedLoop(rng.randrange(1, 9)) if rng.random() < 0.7 else Poisson(rng.uniform(5, 50))
    prompt_tokens = rng.randrange(1, 40)
    is_long = rng.random() < LONG
    if is_long:  # long enough that drafters are given up, tried again and trusted again
        return Workload(arrivals, 6, prompt_tokens, rng.randrange(150, 400))
    return Workload(arrivals, 12, prompt_tokens, rng.randrange(1, 33), stopping=0.3)


def _fleet(rng: random.Random, load: Workload) -> Fleet:
    page_size = rng.choice((4, 16))
    longest = -(-(load.prompt_tokens + load.new_tokens) // page_size)
    return Fleet(
        targets=rng.randrange(1, 4),
        drafters=rng.randrange(4),
        routers=rng.randrange(1, 3),
        sessions_per_target=rng.randrange(1, 6),
        sessions_per_drafter=rng.randrange(1, 9),
        step_tokens=rng.choice((8, 64)),
        pages_per_target=longest + rng.randrange(3 * longest),
        page_size=page_size,
    )
