"""Validation of the options of `slipstream plan`, which form a question to the planner."""

from dataclasses import dataclass
from pathlib import Path

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.errors import ConfigError
from tools.planning.question import BLOCK_LENS, PlanQuestion, Prices
from tools.simulation.oracle import DraftQuality
from tools.simulation.workload import ClosedLoop, Poisson

ACCEPTANCE = 0.8
CONCURRENCY = 8
MS = 1e-3


@dataclass(frozen=True, slots=True)
class StatedCosts:
    """Costs stated as a few numbers."""

    target_step_ms: float
    target_token_ms: float
    draft_token_ms: float
    draft_row_ms: float
    hop_ms: float

    def model(self) -> CostModel:
        target = self.target_step_ms * MS
        target_token = self.target_token_ms * MS
        draft = self.draft_token_ms * MS
        draft_row = self.draft_row_ms * MS
        if target == 0:
            raise ConfigError("--target-step-ms is 0; expected the time of a step, which is more")
        return CostModel(
            target=ForwardCost(by_tokens=((1, target), (2, target + target_token))),
            draft=DraftCost(forward=ForwardCost(by_tokens=((1, draft), (2, draft + draft_row)))),
            hop_s=self.hop_ms * MS,
        )


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Options of `slipstream plan`; None where not given."""

    costs_path: Path | None
    stated: StatedCosts
    acceptance: list[float] | None
    concurrency: int | None
    rate: float | None
    prompt_tokens: int
    new_tokens: int
    block_len: list[int] | None
    target_price: float | None
    drafter_price: float | None

    def question(self) -> PlanQuestion:
        """Builds the question. Raises ConfigError if options contradict each other."""
        costs = self.stated.model() if self.costs_path is None else CostModel.load(self.costs_path)
        acceptance, acceptance_is = self._acceptance(costs)
        return PlanQuestion(
            costs=costs,
            draft=DraftQuality(acceptance),
            arrivals=self._arrivals(),
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            prices=self._prices(),
            block_lens=tuple(self.block_len or BLOCK_LENS),
            acceptance_is=acceptance_is,
        )

    def _acceptance(self, costs: CostModel) -> tuple[tuple[float, ...], str]:
        """Returns acceptance by position in a block, and its source; a given value overrides a measured one."""
        if self.acceptance:
            return tuple(self.acceptance), "given"
        if costs.acceptance is not None:
            return costs.acceptance, f"measured, from {self.costs_path}"
        return (ACCEPTANCE,), "assumed; state it with --acceptance"

    def _arrivals(self) -> ClosedLoop | Poisson:
        if self.rate is None:
            return ClosedLoop(CONCURRENCY if self.concurrency is None else self.concurrency)
        if self.concurrency is not None:
            raise ConfigError("--concurrency and --rate are two ways to state the load; give one of them")
        if self.rate == 0:
            raise ConfigError("--rate is 0; expected requests a second, which are more")
        return Poisson(self.rate)

    def _prices(self) -> Prices | None:
        if self.target_price is None and self.drafter_price is None:
            return None
        if self.target_price is None or self.drafter_price is None:
            raise ConfigError("--target-price and --drafter-price go together; give both")
        return Prices(self.target_price, self.drafter_price)
