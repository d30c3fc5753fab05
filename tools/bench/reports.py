"""Entry points of `slipstream bench`: concurrent batches, or requests at given rates, printed and written to files."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError
from serve_app.endpoint_client import ChatEndpoint
from tools.bench.experiment import AT_ONCE, Plan, run_bench
from tools.bench.html_report import html_report
from tools.bench.latencies import LoadPoint
from tools.bench.open_loop import Sweep, run_sweep
from tools.bench.tables import latencies_table

A_SECOND = "requests/s"


def report_on_batches(
    url: str,
    config: SlipstreamConfig,
    plan: Plan,
    generate: bool,
    console: Console,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Runs the experiment, prints it and writes it to files."""
    report = asyncio.run(run_bench(url, config, plan, generate, console, json_path))
    console.print(report.tables())
    if html_path is not None:
        _write_html(html_path, config.model.name, f"{plan.max_tokens} tokens an answer", AT_ONCE, report.points)


def measure_rates(
    url: str,
    key: str | None,
    plan: Plan,
    rates: Sequence[float],
    requests: int,
    console: Console,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Measures the plan's prompts at each rate, prints the results and writes them to files."""
    if not rates:
        raise ConfigError("--url needs --rate: requests a second, as in --rate 1 --rate 2")
    sweep = Sweep(plan.prompts, tuple(rates), requests, plan.max_tokens)
    model, points = asyncio.run(_swept(url, key, sweep, console))
    console.print(latencies_table(A_SECOND, points))
    settings = {"rates": sweep.rates, "requests": requests, "max_tokens": sweep.max_tokens, "seed": sweep.seed}
    if json_path is not None:
        data = {"model": model, "settings": settings, "points": [asdict(point) for point in points]}
        json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if html_path is not None:
        conditions = f"{requests} requests at each rate, {sweep.max_tokens} tokens an answer, open loop, Poisson"
        _write_html(html_path, model, conditions, A_SECOND, points)


async def _swept(url: str, key: str | None, sweep: Sweep, console: Console) -> tuple[str, list[LoadPoint]]:
    async with ChatEndpoint.at(url, key) as endpoint:
        model = await endpoint.model()
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
            bar = progress.add_task("Runs", total=sweep.runs)
            return model, await run_sweep(endpoint, model, sweep, lambda: progress.advance(bar))


def _write_html(path: Path, model: str, conditions: str, load: str, points: Sequence[LoadPoint]) -> None:
    path.write_text(html_report(f"slipstream bench: {model}", conditions, load, points), encoding="utf-8")
