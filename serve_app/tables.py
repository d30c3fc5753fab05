"""Terminal tables."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from serve_app.endpoint_client import Tally

TALLY_ROWS = (
    "verifies",
    "of them with a block",
    "drafted tokens",
    "accepted",
    "rejected",
    "acceptance rate",
    "acceptance length",
)


def shown(value: float | None, spec: str = ".2f") -> str:
    """Formats a number, or a dash for None."""
    return "-" if value is None else format(value, spec)


def tally_column(tally: Tally) -> tuple[str, ...]:
    """Formats a tally as a column of TALLY_ROWS."""
    counts = tally.verifies, tally.blocks, tally.drafted, tally.accepted, tally.rejected
    return (*map(str, counts), shown(tally.acceptance_rate), shown(tally.acceptance_length))


def table(title: str, first: str, *others: str) -> Table:
    """Returns an empty table with a first column of names and further columns of values."""
    result = Table(title=title, title_justify="left")
    result.add_column(first)
    for other in others:
        result.add_column(other, justify="right")
    return result


def sheet(title: str, rows: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Table:
    """Returns a table with one named row per value and one column per entry of `columns`."""
    result = table(title, "", *columns)
    for name, *values in zip(rows, *columns.values(), strict=True):
        result.add_row(name, *values)
    return result
