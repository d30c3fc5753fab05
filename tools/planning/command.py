"""`slipstream plan`: turns its options into one question to the planner."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


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
    from tools.planning.plan_request import PlanRequest, StatedCosts

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
