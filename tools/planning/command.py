"""The `slipstream plan` command: validates its options and runs the planner."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.errors import ConfigError
from serve_app.cli.main import writable_path
from tools.planning.estimates import DRAFT_LENGTHS, PlanInput, Prices
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson


def plan(
    costs_path: Annotated[
        Path | None,
        typer.Option("--costs", metavar="COSTS", help="Measured costs as JSON; replaces the next five options."),
    ] = None,
    target_step_ms: Annotated[float, typer.Option(min=0, help="Target step with one token of one session.")] = 20.0,
    target_token_ms: Annotated[float, typer.Option(min=0, help="Each additional token in a target step.")] = 0.1,
    draft_token_ms: Annotated[float, typer.Option(min=0, help="One draft token for one session.")] = 2.0,
    draft_row_ms: Annotated[float, typer.Option(min=0, help="One draft token for each further session.")] = 0.05,
    hop_ms: Annotated[float, typer.Option(min=0, help="One-way message latency.")] = 0.3,
    acceptance: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=1,
            help="Acceptance probability of a draft token after accepted tokens; repeat it per block position. "
            "Default: measured with the costs, else 0.8.",
        ),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Concurrent sessions per target; default: 8.")] = None,
    rate: Annotated[float | None, typer.Option(min=0, help="Poisson arrivals: requests per second and target.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens per request.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    draft_tokens: Annotated[list[int] | None, typer.Option(min=1, help="Draft lengths to try; repeatable.")] = None,
    block_len: Annotated[list[int] | None, typer.Option(min=1, hidden=True)] = None,  # earlier name of --draft-tokens
    target_price: Annotated[float | None, typer.Option(min=0, help="Price per target replica and hour.")] = None,
    drafter_price: Annotated[float | None, typer.Option(min=0, help="Price per drafter and hour.")] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="OUT", callback=writable_path, help="Write results to this file."),
    ] = None,
    picture_path: Annotated[
        Path | None,
        typer.Option("--plot", metavar="OUT", callback=writable_path, help="Write an SVG chart to this file."),
    ] = None,
    theory: Annotated[
        bool, typer.Option("--theory", help="Compare the gain by formula and by simulation instead.")
    ] = False,
) -> None:
    """Simulates fleets under given costs and load, and recommends one."""
    from tools.planning.plan_report import run_plan, run_theory

    console = Console()
    if theory and (json_path or picture_path):
        raise ConfigError(f"--theory does not use {'--json' if json_path else '--plot'}; leave one of them out")
    if theory:
        run_theory(console)
        return
    inputs = plan_inputs(
        stated_costs(target_step_ms, target_token_ms, draft_token_ms, draft_row_ms, hop_ms),
        costs_path,
        acceptance=acceptance,
        concurrency=concurrency,
        rate=rate,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        draft_lengths=draft_tokens or block_len,
        target_price=target_price,
        drafter_price=drafter_price,
    )
    run_plan(inputs, console, json_path, picture_path)


DEFAULT_ACCEPTANCE = 0.8
DEFAULT_CONCURRENCY = 8
MS = 1e-3


def stated_costs(
    target_step_ms: float, target_token_ms: float, draft_token_ms: float, draft_row_ms: float, hop_ms: float
) -> CostModel:
    """Builds a linear cost model from five costs in milliseconds. Raises ConfigError if a step takes no time."""
    target = target_step_ms * MS
    draft = draft_token_ms * MS
    if target == 0:
        raise ConfigError("--target-step-ms is 0; give a positive duration")
    return CostModel(
        target=ForwardCost(by_tokens=((1, target), (2, target + target_token_ms * MS))),
        draft=DraftCost(forward=ForwardCost(by_tokens=((1, draft), (2, draft + draft_row_ms * MS)))),
        hop_s=hop_ms * MS,
    )


def plan_inputs(
    stated: CostModel,
    costs_path: Path | None = None,
    *,
    acceptance: Sequence[float] | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    prompt_tokens: int = 64,
    new_tokens: int = 64,
    draft_lengths: Sequence[int] | None = None,
    target_price: float | None = None,
    drafter_price: float | None = None,
) -> PlanInput:
    """Validates the options of `slipstream plan`. Measured costs, if given, replace the stated costs."""
    costs = stated if costs_path is None else CostModel.load(costs_path)
    if acceptance:
        acceptances, source = tuple(acceptance), "given"
    elif costs.acceptance is not None:
        acceptances, source = costs.acceptance, f"measured, from {costs_path}"
    else:
        acceptances, source = (DEFAULT_ACCEPTANCE,), "assumed; state it with --acceptance"
    return PlanInput(
        costs=costs,
        draft=DraftQuality(acceptances),
        arrivals=_arrivals(concurrency, rate),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prices=_prices(target_price, drafter_price),
        draft_lengths=tuple(draft_lengths or DRAFT_LENGTHS),
        acceptance_source=source,
    )


def _arrivals(concurrency: int | None, rate: float | None) -> ClosedLoop | Poisson:
    if rate is None:
        return ClosedLoop(DEFAULT_CONCURRENCY if concurrency is None else concurrency)
    if concurrency is not None:
        raise ConfigError("--concurrency and --rate both state the load; give only one of them")
    if rate == 0:
        raise ConfigError("--rate is 0; give a positive number of requests per second")
    return Poisson(rate)


def _prices(target: float | None, drafter: float | None) -> Prices | None:
    if target is None and drafter is None:
        return None
    if target is None or drafter is None:
        raise ConfigError("--target-price and --drafter-price go together; give both")
    if target == drafter == 0:
        raise ConfigError("--target-price and --drafter-price are 0; give a positive price, or leave both out")
    return Prices(target, drafter)
