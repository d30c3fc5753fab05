"""Terminal output of the doctor."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tools.doctor.checks import Check


def report(checks: Sequence[Check]) -> RenderableType:
    """Renders one line per check, and below them the faults with their fixes."""
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(check.name, "[red]wrong[/]" if check.faults else "[green]ok[/]", escape(check.seen))
    faults = [Text(f"{check.name}: {fault}") for check in checks for fault in check.faults]
    return Group(table, *faults)
