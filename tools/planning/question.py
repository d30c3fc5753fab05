"""Questions to the planner, and the candidate fleets. Data only."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from cluster.costs import CostModel
from tools.simulation.oracle import DraftQuality
from tools.simulation.setting import Mode
from tools.simulation.workload import ClosedLoop, Poisson

BLOCK_LENS = (2, 3, 5, 8)
RATIOS = ((4, 1), (2, 1), (1, 1), (1, 2))  # (targets, drafters)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of one replica, per hour."""

    target: float
    drafter: float


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """Load and costs to plan for; the load is that of one target replica."""

    costs: CostModel
    draft: DraftQuality
    arrivals: ClosedLoop | Poisson
    prompt_tokens: int = 64
    new_tokens: int = 64
    prices: Prices | None = None
    block_lens: tuple[int, ...] = BLOCK_LENS
    ratios: tuple[tuple[int, int], ...] = RATIOS
    seed: int = 0
    acceptance_is: str = "given"  # source of the acceptance of `draft`


@dataclass(frozen=True, slots=True)
class CandidateFleet:
    """A fleet, and how it speculates."""

    targets: int
    drafters: int
    block_len: int
    mode: Mode

    @property
    def name(self) -> str:
        return self.mode.value if self.block_len else "plain"

    @property
    def fleet(self) -> tuple[int, int]:
        """Numbers of targets and drafters."""
        return self.targets, self.drafters

    @property
    def drafters_per_target(self) -> float:
        return self.drafters / self.targets

    def is_roomier_than(self, other: "CandidateFleet") -> bool:
        """Returns whether it speculates like the other, with more drafters per target."""
        speculates_so = (self.block_len, self.mode) == (other.block_len, other.mode)
        return speculates_so and self.drafters_per_target > other.drafters_per_target


PLAIN = CandidateFleet(1, 0, 0, Mode.ADAPTIVE)


def candidates(question: PlanQuestion) -> Iterator[CandidateFleet]:
    """Yields non-speculative decoding, then all speculating candidates."""
    yield PLAIN
    for (targets, drafters), block_len, mode in product(question.ratios, question.block_lens, Mode):
        yield CandidateFleet(targets, drafters, block_len, mode)


def cost_per_million(prices: Prices | None, candidate: CandidateFleet, tokens_per_s: float) -> float | None:
    """Returns the cost of a million tokens from the whole fleet; None without prices."""
    if prices is None:
        return None
    per_s = (candidate.targets * prices.target + candidate.drafters * prices.drafter) / 3600
    return 1e6 * per_s / tokens_per_s
