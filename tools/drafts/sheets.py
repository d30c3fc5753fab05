"""Output of `slipstream drafts inspect`, as a terminal table and as data."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from tools.drafts.inspection.facts import DraftFacts, StatesRead
from tools.drafts.inspection.inspect import DraftInspection


def inspection_data(found: DraftInspection) -> dict[str, Any]:
    """Returns all results as JSON-compatible data."""
    states = found.facts.states
    return {
        "folder": str(found.folder),
        "fits": found.fits,
        "misfits": [asdict(misfit) for misfit in found.misfits],
        "notes": list(found.notes),
        **asdict(found.facts),
        "bytes_a_token": None if states is None else states.row_bytes,
        "config": found.snippet,
    }


def inspection_report(found: DraftInspection) -> Group:
    """Renders the facts, then the misfits, or if there are none, the configuration."""
    sheet = Table(show_header=False, box=None, pad_edge=False)
    sheet.add_column(style="bold")
    sheet.add_column()
    for name, value in _rows(found.facts):
        sheet.add_row(name, escape(value))
    parts: list[RenderableType] = [sheet, *(escape(f"note: {note}") for note in found.notes)]
    if found.misfits:
        count = len(found.misfits)
        parts.append(f"\n[bold red]It does not fit[/], for {count} reason{'s' * (count > 1)}:")
        parts += [escape(f"* {misfit}") for misfit in found.misfits]
    else:
        parts += [f"\n[bold green]{_praise(found)}[/]; configure it as\n", escape(found.snippet)]
    return Group(*parts)


def _praise(found: DraftInspection) -> str:
    return "It is whole" if found.target is None else "It fits"


def _rows(facts: DraftFacts) -> list[tuple[str, str]]:
    """Lists the facts that are known."""
    size = facts.size
    rows = [
        ("layout", facts.layout.name),
        ("draft.method", facts.layout.method or "none"),
        ("made for", facts.made_for),
        ("parameters", f"{size.parameters:,}, {size.bytes / 1e6:,.1f} MB"),
        ("sizes", ", ".join(f"{name} {value}" for name, value in facts.shape.items())),
        ("proposes", "" if facts.proposes is None else f"{facts.proposes:,} of {facts.vocabulary:,} tokens"),
        ("embedding", facts.embedding),
        ("LM head", facts.lm_head),
        ("positions", "" if facts.positions is None else f"{facts.positions:,}"),
        ("rotary positions", facts.rope),
        ("longest block", "" if facts.longest_block is None else f"{facts.longest_block} tokens"),
        *([("target states", "none: it reads tokens alone")] if facts.states is None else _states_rows(facts.states)),
        *(("understood as" if index == 0 else "", line) for index, line in enumerate(facts.conventions)),
    ]
    return [row for row in rows if row[1]]


def _states_rows(states: StatesRead) -> list[tuple[str, str]]:
    what = "after the final norm" if states.is_final else "streams before any norm"
    which = f"{list(states.layers)} (k: after k layers)" if states.layers else "by the target's depth"
    if states.is_final and not states.layers:
        which = "the last"
    rows = [("target states", f"{which}, {what}; {states.width} elements a token")]
    for where, by_type in states.row_bytes.items():
        width = states.width if where == "drafter" else states.projected
        bytes_each = ", ".join(f"{count:,} in {dtype}" for dtype, count in by_type.items())
        name = f"projected at {where}" if states.projected else "on the wire"
        rows.append((name, f"{width} elements a token, {bytes_each} bytes"))
    return rows
