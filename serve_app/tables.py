"""Measures as tables for a terminal."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from serve_app.measures import ArmSummary, Speedup, Tally


def shown(value: float | None, spec: str = ".2f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, spec)


def tally_columns(tally: Tally) -> tuple[str, ...]:
    """Drafted, accepted, rejected, acceptance rate, acceptance length."""
    counts = tally.drafted, tally.accepted, tally.rejected
    return (*map(str, counts), shown(tally.acceptance_rate), shown(tally.acceptance_length))


def table(title: str, first: str, *numbers: str) -> Table:
    """An empty table of one column of names and columns of numbers."""
    made = Table(title=title, title_justify="left")
    made.add_column(first)
    for number in numbers:
        made.add_column(number, justify="right")
    return made


def arms_table(summaries: Sequence[ArmSummary]) -> Table:
    """Each arm's speed and acceptance."""
    made = table(
        "Arms",
        "arm",
        "at once",
        "tokens/s",
        "first token, ms",
        "latency, s",
        "drafted",
        "accepted",
        "rejected",
        "acceptance rate",
        "acceptance length",
    )
    for summary in summaries:
        speed = shown(summary.tokens_per_s, ".1f"), f"{summary.first_token_s * 1e3:.0f}", shown(summary.latency_s)
        made.add_row(summary.arm, str(summary.concurrency), *speed, *tally_columns(summary.tally))
    return made


def speedups_table(speedups: Sequence[Speedup]) -> Table:
    """Each arm against those that it is to beat."""
    made = table(
        "Speed-up: geometric mean over prompts, 95 % bootstrap interval", "arm", "at once", "speed-up", "equal answers"
    )
    for speedup in speedups:
        ratio = f"{speedup.mean:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"
        equal = f"{speedup.equal} of {speedup.answers}"
        made.add_row(f"{speedup.arm} against {speedup.base}", str(speedup.concurrency), ratio, equal)
    return made


def kinds_table(kinds: Mapping[str, Tally]) -> Table:
    """Acceptance for each kind of prompt."""
    made = table("Acceptance by kind of prompt", "kind", "drafted", "accepted", "acceptance rate")
    for kind, tally in kinds.items():
        made.add_row(kind, str(tally.drafted), str(tally.accepted), shown(tally.acceptance_rate))
    return made
