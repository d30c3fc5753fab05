"""`slipstream plan`: turns its options into one question to the planner.

Validation of the options of `slipstream plan`, which form a question to the planner.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.errors import ConfigError
from tools.planning.estimates import BLOCK_LENS, PlanQuestion, Prices
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson


def plan(
    costs_path: Annotated[
        Path | None, typer.Option("--costs", metavar="COSTS", help="Measured costs as JSON, instead of the next five.")
    ] = None,
    target_step_ms: Annotated[float, typer.Option(min=0, help="A target step of one row and one token.")] = 20.0,
    target_token_ms: Annotated[float, typer.Option(min=0, help="Each further token of a step, of any row.")] = 0.1,
    draft_token_ms: Annotated[float, typer.Option(min=0, help="A draft token for one session.")] = 2.0,
    draft_row_ms: Annotated[float, typer.Option(min=0, help="The same for each further session in the pass.")] = 0.05,
    hop_ms: Annotated[float, typer.Option(min=0, help="A message, one way.")] = 0.3,
    acceptance: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=1,
            help="Of a draft token, given those before it; repeatable: by position in a block. "
            "The default is what was measured with the costs, or else 0.8.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sessions at once on each target; the default is 8.")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0, help="Instead: requests a second for each target.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a request.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 64,
    block_len: Annotated[list[int] | None, typer.Option(min=1, help="Longest blocks to try; repeatable.")] = None,
    target_price: Annotated[float | None, typer.Option(min=0, help="Of one target replica, an hour.")] = None,
    drafter_price: Annotated[float | None, typer.Option(min=0, help="Of one drafter, an hour.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write everything here.")] = None,
    picture_path: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT", help="Write an SVG picture here.")
    ] = None,
    theory: Annotated[
        bool, typer.Option("--theory", help="Instead: what speculation brings, by formula and by simulation.")
    ] = False,
) -> None:
    """Simulates fleets under given costs and load, and recommends one."""
    from tools.planning.plan_report import run_plan, run_theory

    console = Console()
    if theory:
        run_theory(console)
        return
    stated = StatedCosts(target_step_ms, target_token_ms, draft_token_ms, draft_row_ms, hop_ms)
    request = PlanRequest(
        costs_path,
        stated,
        acceptance,
        concurrency,
        rate,
        prompt_tokens,
        new_tokens,
        block_len,
        target_price,
        drafter_price,
    )
    run_plan(request.question(), console, json_path, picture_path)


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
