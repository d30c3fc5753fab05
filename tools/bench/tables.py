"""Terminal tables of the bench's results."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from serve_app.endpoint_client import Tally
from serve_app.tables import TALLY_ROWS, sheet, shown, table, tally_column
from tools.bench.latencies import MEASURES, QUANTILES, ArmSummary, LoadPoint, Speedup


def arms_sheet(concurrency: int, summaries: Sequence[ArmSummary]) -> Table:
    """Tabulates each arm's speed and acceptance at one concurrency."""
    rows = "tokens/s", "time to first token, ms (median)", "latency, s (median)", *TALLY_ROWS
    columns = {
        summary.arm: (
            shown(summary.tokens_per_s, ".1f"),
            shown(summary.first_token_s * 1e3, ".0f"),
            shown(summary.latency_s),
            *tally_column(summary.tally),
        )
        for summary in summaries
    }
    return sheet(f"{concurrency} at once", rows, columns)


def latencies_table(load: str, points: Sequence[LoadPoint]) -> Table:
    """Tabulates each arm's latencies under each load, in milliseconds at p50, p90 and p99."""
    names = (f"{measure.upper()}, ms" for measure in MEASURES)
    made = table("Latencies at p50, p90, p99", "arm", load, "tokens/s", "answers", "failed", *names)
    for point in points:
        counts = f"{point.load:g}", shown(point.tokens_per_s, ".1f"), str(point.answers), str(point.failed)
        made.add_row(point.arm, *counts, *(_quantiles(point, measure) for measure in MEASURES))
    return made


def _quantiles(point: LoadPoint, measure: str) -> str:
    return " ".join(milliseconds(point, measure, quantile) for quantile in QUANTILES)


def milliseconds(point: LoadPoint, measure: str, quantile: str) -> str:
    """Formats one quantile in milliseconds, for instance measure "ttft" at "p99"."""
    seconds = point.quantile_s(measure, quantile)
    return shown(None if seconds is None else 1e3 * seconds, ".0f")


def speedups_table(speedups: Sequence[Speedup]) -> Table:
    """Tabulates the speed-up of arms over their baselines."""
    made = table("Speed-up: geometric mean over prompts", "arms", "at once", "95 % bootstrap interval", "equal answers")
    for speedup in speedups:
        ratio = f"{speedup.mean:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"
        equal = f"{speedup.equal} of {speedup.answers}"
        made.add_row(f"{speedup.arm} / {speedup.base}", str(speedup.concurrency), ratio, equal)
    return made


def kinds_table(kinds: Mapping[str, Tally]) -> Table:
    """Tabulates acceptance for each kind of prompt."""
    made = table("Acceptance by kind of prompt", "kind", "drafted", "accepted", "acceptance rate")
    for kind, tally in kinds.items():
        made.add_row(kind, str(tally.drafted), str(tally.accepted), shown(tally.acceptance_rate))
    return made
