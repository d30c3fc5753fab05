"""Entry points of `slipstream bench`: run a closed-loop or open-loop benchmark, and report it as text, JSON and HTML.

The HTML report is one self-contained file with tables and charts.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from rich.console import Console

from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError
from serve_app.endpoint_client import ChatEndpoint
from serve_app.tables import shown
from tools.bench.experiment import AT_ONCE, Plan, run_bench
from tools.bench.latencies import MEASURES, QUANTILES, LoadPoint
from tools.bench.open_loop import Sweep, run_sweep
from tools.bench.tables import latencies_table, milliseconds
from tools.charts import line_chart, require_matplotlib, svg
from tools.progress import log_phase, progress

NAMES = {
    "ttft": "Time to the first token",
    "tpot": "Time per output token after the first",
    "itl": "Time between stream events",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .8rem; border-bottom: 1px solid #ccc; }
th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
"""


def html_report(title: str, conditions: str, load: str, points: Sequence[LoadPoint]) -> str:
    """Renders the report as HTML; `load` is the unit of the points' load, for instance "requests/s"."""
    body = "\n".join([_table(load, points), *_charts(load, points)])
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f"<body><h1>{escape(title)}</h1><p>{escape(conditions)}</p>\n{body}\n</body></html>\n"
    )


def _table(load: str, points: Sequence[LoadPoint]) -> str:
    names = [f"{measure.upper()} {quantile}, ms" for measure in MEASURES for quantile in QUANTILES]
    heads = ["arm", load, "tokens/s", "answers", "failed", *names]
    rows = ["".join(f'<th scope="col">{escape(head)}</th>' for head in heads)]
    for point in points:
        values = [f"{point.load:g}", shown(point.tokens_per_s, ".1f"), str(point.answers), str(point.failed)]
        values += [milliseconds(point, measure, quantile) for measure in MEASURES for quantile in QUANTILES]
        rows.append(f'<th scope="row">{escape(point.arm)}</th>' + "".join(f"<td>{value}</td>" for value in values))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _charts(load: str, points: Sequence[LoadPoint]) -> Iterator[str]:
    arms = list(dict.fromkeys(point.arm for point in points))
    speeds = {arm: [(point.load, point.tokens_per_s) for point in points if point.arm == arm] for arm in arms}
    yield f"<h2>Throughput</h2>{svg(line_chart(speeds, {}, load, 'tokens/s'))}"
    for measure in MEASURES:
        lines = {
            f"{arm}, {quantile}": [
                (point.load, 1e3 * seconds)
                for point in points
                if point.arm == arm and (seconds := point.quantile_s(measure, quantile)) is not None
            ]
            for arm in arms
            for quantile in QUANTILES
        }
        if any(lines.values()):
            measured = {name: line for name, line in lines.items() if line}
            yield f"<h2>{NAMES[measure]}</h2>{svg(line_chart(measured, {}, load, 'ms'))}"


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
    """Runs the experiment, prints the report and writes it to files."""
    if html_path is not None:
        require_matplotlib()
    report = asyncio.run(run_bench(url, config, plan, generate, console, json_path))
    console.print(report.tables())
    if html_path is not None:
        _write_html(html_path, config.model.name, f"{plan.max_tokens} tokens per answer", AT_ONCE, report.points)


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
    """Measures the plan's prompts at each request rate, prints the results and writes them to files."""
    if not rates:
        raise ConfigError("--url needs --rate (requests per second), as in --rate 1 --rate 2")
    if html_path is not None:
        require_matplotlib()
    sweep = Sweep(plan.prompts, tuple(rates), requests, plan.max_tokens)
    model, points = asyncio.run(_run_sweep(url, key, sweep, console))
    console.print(latencies_table(A_SECOND, points))
    settings = {"rates": sweep.rates, "requests": requests, "max_tokens": sweep.max_tokens, "seed": sweep.seed}
    if json_path is not None:
        data = {"model": model, "settings": settings, "points": [asdict(point) for point in points]}
        json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if html_path is not None:
        conditions = f"{requests} requests per rate, {sweep.max_tokens} tokens per answer, open loop, Poisson"
        _write_html(html_path, model, conditions, A_SECOND, points)


async def _run_sweep(url: str, key: str | None, sweep: Sweep, console: Console) -> tuple[str, list[LoadPoint]]:
    async with ChatEndpoint.at(url, key) as endpoint:
        model = await endpoint.model()
        log_phase(console, "Warming up")
        with progress(console, "Runs", sweep.runs) as advance:
            return model, await run_sweep(endpoint, model, sweep, advance)


def _write_html(path: Path, model: str, conditions: str, load: str, points: Sequence[LoadPoint]) -> None:
    path.write_text(html_report(f"slipstream bench: {model}", conditions, load, points), encoding="utf-8")
