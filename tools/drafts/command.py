"""Subcommands of `slipstream drafts`: `inspect` describes a draft checkpoint, `measure` compares drafts.

Also formats the output of `inspect` as a terminal table and as JSON.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from cluster.errors import ConfigError, ModelError
from serve_app.cli.main import load_single, writable_path

if TYPE_CHECKING:
    from tools.drafts.headers import DraftFacts, StatesRead
    from tools.drafts.inspection import DraftInspection

DOES_NOT_FIT = 1  # exit status if the draft does not fit

drafts_app = typer.Typer(help="Inspect and compare draft checkpoints.", no_args_is_help=True)


@drafts_app.command()
def inspect(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER", help="Folder of a draft checkpoint, or of a target with layers that can draft."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Target's folder or Hugging Face id."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a configuration key of the draft, as in --set draft.eagle.layer_ids=state.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Describes a draft checkpoint, its needs and its configuration; exit status 1 if it does not fit."""
    from actors.models.checkpoint import local_folder
    from cluster.config import apply_overrides
    from tools.drafts.inspection import inspect_draft

    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelError(f"folder {path} does not exist; download the checkpoint first")
    given: dict[str, Any] = {}
    apply_overrides(given, overrides or ())
    options = given.pop("draft", {})
    if given or not isinstance(options, dict):
        raise ConfigError("--set only accepts keys of the section draft here, for instance draft.eagle.layer_ids")
    found = inspect_draft(path, local_folder(target, with_weights=False) if target else None, options)
    if as_json:
        typer.echo(json.dumps(inspection_data(found), indent=1))
    else:
        Console().print(inspection_report(found), soft_wrap=True)
    if not found.fits:
        raise typer.Exit(DOES_NOT_FIT)


@drafts_app.command()
def measure(
    configs: Annotated[
        list[Path], typer.Argument(metavar="CONFIG...", help="Configurations of several drafts for one target.")
    ],
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines {"kind", "prompt"}; default: 24 prompts of six kinds.')
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="Temperature; repeatable; default: 0.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 64,
    draft_tokens: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Draft length of chains; repeatable; default: 1 2 4 8.")
    ] = None,
    block_len: Annotated[list[int] | None, typer.Option(min=1, max=64, hidden=True)] = None,  # earlier name
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Nodes per tree; repeatable; default: 2 4 8 16.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="OUT", callback=writable_path, help="Write results to this file."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT", callback=writable_path, help="Write an SVG chart to this file.")
    ] = None,
) -> None:
    """Measures several drafts in this process, on the same answers of one target, under Gumbel coupling."""
    from serve_app.demo_data import BENCH_PROMPTS
    from serve_app.operations.preflight import check_models
    from tools.bench.experiment import read_prompts
    from tools.charts import require_matplotlib, svg
    from tools.drafts.comparison import (
        Comparison,
        compare,
        comparison_chart,
        comparison_data,
        comparison_sheets,
        named,
    )

    if plot is not None:
        require_matplotlib()
    loaded = [load_single(path, ()) for path in configs]
    comparison = Comparison(
        drafts=named(configs, loaded),
        prompts=tuple(each.prompt for each in read_prompts(prompts or BENCH_PROMPTS)),
        temperatures=tuple(temperature or (0.0,)),
        tokens=tokens,
        draft_lengths=tuple(sorted(draft_tokens or block_len or (1, 2, 4, 8))),
        nodes=tuple(sorted(nodes or (2, 4, 8, 16))),
    )
    for config in loaded:
        check_models(config, with_weights=True)
    console = Console()
    compared = compare(comparison, console)
    for sheet in comparison_sheets(compared):
        console.print(sheet)
    if json_path is not None:
        json_path.write_text(json.dumps(comparison_data(compared), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        plot.write_text(svg(comparison_chart(compared)), encoding="utf-8")


def inspection_data(found: "DraftInspection") -> dict[str, Any]:
    """Returns the inspection as JSON-compatible data."""
    states = found.facts.states
    return {
        "folder": str(found.folder),
        "fits": found.fits,
        "misfits": [asdict(misfit) for misfit in found.mismatches],
        "notes": list(found.notes),
        **asdict(found.facts),
        "bytes_a_token": None if states is None else states.row_bytes,
        "config": found.snippet,
    }


def inspection_report(found: "DraftInspection") -> Group:
    """Renders the facts, then the mismatches, or the configuration if there are none."""
    sheet = Table(show_header=False, box=None, pad_edge=False)
    sheet.add_column(style="bold")
    sheet.add_column()
    for name, value in _rows(found.facts):
        sheet.add_row(name, escape(value))
    parts: list[RenderableType] = [sheet, *(escape(f"note: {note}") for note in found.notes)]
    if found.mismatches:
        count = len(found.mismatches)
        parts.append(f"\n[bold red]It does not fit[/], for {count} reason{'s' * (count > 1)}:")
        parts += [escape(f"* {misfit}") for misfit in found.mismatches]
    else:
        verdict = "It is whole" if found.target is None else "It fits"
        parts += [f"\n[bold green]{verdict}[/]; configure it as\n", escape(found.snippet)]
    return Group(*parts)


def _rows(facts: "DraftFacts") -> list[tuple[str, str]]:
    """Returns the known facts as rows of a table."""
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
        *([("target states", "none: it only reads tokens")] if facts.states is None else _states_rows(facts.states)),
        *(("understood as" if index == 0 else "", line) for index, line in enumerate(facts.conventions)),
    ]
    return [row for row in rows if row[1]]


def _states_rows(states: "StatesRead") -> list[tuple[str, str]]:
    what = "after the final norm" if states.is_final else "before any norm"
    which = f"{list(states.layers)} (k: after k layers)" if states.layers else "layers chosen by the target's depth"
    if states.is_final and not states.layers:
        which = "the last"
    rows = [("target states", f"{which}, {what}; {states.width} elements per token")]
    for where, by_type in states.row_bytes.items():
        width = states.width if where == "drafter" else states.projected
        bytes_each = ", ".join(f"{count:,} in {dtype}" for dtype, count in by_type.items())
        name = f"projected at {where}" if states.projected else "on the wire"
        rows.append((name, f"{width} elements per token, {bytes_each} bytes"))
    return rows
