"""Mean gain of speculation: formula versus simulation.

The simulation keeps the formula's assumptions: one session at a time, a step that costs the same for one token and for
a block, and a target that waits for every block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from cluster.costs import CostModel, DraftCost, ForwardCost
from tools.planning.expectation import RoundCosts, break_even_draft_s, expected_tokens, speed_up
from tools.simulation.oracle import DraftQuality
from tools.simulation.report import SimulationReport
from tools.simulation.setting import Mode, Setting, SpeculationSetting
from tools.simulation.workload import ClosedLoop, Workload
from tools.simulation.world import World

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
BLOCK_LENS = (3, 5, 7)
TOLERANCE = 0.05  # allowed deviation of the simulation, relative to the formula
STEP_S = 0.02
HOP_S = 0.0005
LOAD = Workload(ClosedLoop(1), sessions=32, prompt_tokens=8, new_tokens=192)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Comparison for one acceptance and block length, drafted in lock step."""

    acceptance: float
    block_len: int
    tokens: float  # committed per verified block, by formula
    simulated_tokens: float
    gain: float  # over non-speculative decoding if drafting a token takes a tenth of a step, by formula
    simulated_gain: float
    break_even_s: float  # drafting pass that cancels the gain, by formula
    gain_there: float  # over non-speculative decoding with that pass, by simulation; 1 expected

    @property
    def break_even_steps(self) -> float:
        """`break_even_s` in target steps."""
        return self.break_even_s / STEP_S


def lessons(advance: Callable[[], None] = lambda: None) -> list[Lesson]:
    """Computes every acceptance and block length; `advance` is called after each."""
    plain_rate = _run(0.0, 0, 0.0).tokens_per_s
    found = []
    for acceptance, block_len in product(ACCEPTANCES, BLOCK_LENS):
        found.append(_lesson(acceptance, block_len, plain_rate))
        advance()
    return found


def _lesson(acceptance: float, block_len: int, plain_rate: float) -> Lesson:
    tokens = expected_tokens(acceptance, block_len)
    costs = RoundCosts(STEP_S, STEP_S, block_len * STEP_S / 10, HOP_S)
    break_even_s = break_even_draft_s(tokens, costs)
    usual = _run(acceptance, block_len, costs.draft_s)
    there = _run(acceptance, block_len, break_even_s)
    assert usual.tokens_per_block is not None, "nothing was drafted"
    return Lesson(
        acceptance,
        block_len,
        tokens,
        usual.tokens_per_block,
        speed_up(tokens, costs.draft_s + costs.verify_s + 2 * HOP_S, STEP_S),
        usual.tokens_per_s / plain_rate,
        break_even_s,
        there.tokens_per_s / plain_rate,
    )


def _run(acceptance: float, block_len: int, draft_s: float) -> SimulationReport:
    costs = CostModel(
        target=ForwardCost.linear(STEP_S),
        draft=DraftCost(forward=ForwardCost.linear(0.0), per_pass_s=draft_s),
        hop_s=HOP_S,
    )
    return World(Setting(costs, SpeculationSetting(block_len, DraftQuality((acceptance,)), Mode.LOCK_STEP), LOAD)).run()
