"""Subcommands of `slipstream drafts`: `inspect` describes a draft checkpoint, `measure` compares drafts."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.errors import ConfigError, ModelError

DOES_NOT_FIT = 1  # exit status

drafts_app = typer.Typer(help="Look at draft checkpoints, and compare drafts.", no_args_is_help=True)


@drafts_app.command()
def inspect(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Draft checkpoint, or a target of which a part may draft: a folder.")
    ],
    target: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Target to draft for: a folder, or a Hugging Face id."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Look at it as with this key of a configuration, as in --set draft.eagle.layer_ids=state.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Describes a draft checkpoint, what it needs and how to configure it; exit status 1: it does not fit."""
    from actors.models.checkpoint import local_folder
    from cluster.config import apply_overrides
    from tools.drafts.inspection.inspect import inspect_draft
    from tools.drafts.sheets import inspection_data, inspection_report

    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelError(f"there is no folder {path}; download the checkpoint first")
    given: dict[str, Any] = {}
    apply_overrides(given, overrides or ())
    options = given.pop("draft", {})
    if given or not isinstance(options, dict):
        raise ConfigError("--set takes keys of the section draft here, such as draft.eagle.layer_ids")
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
        list[Path], typer.Argument(metavar="CONFIG...", help="YAML files that serve one target with several drafts.")
    ],
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines {"kind", "prompt"}; default: 24 prompts of six kinds.')
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="Repeatable; default: 0.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of every answer.")] = 64,
    block_len: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Tokens of a chain; repeatable; default: 1 2 4 8.")
    ] = None,
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Nodes of a tree; repeatable; default: 2 4 8 16.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write all of it here.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT", help="Write an SVG picture here.")] = None,
) -> None:
    """Measures several drafts over the same answers of their target, in this process, under Gumbel coupling."""
    from cluster.config import load_config
    from serve_app.demo_data import BENCH_PROMPTS
    from serve_app.operations.preflight import check_models
    from tools.bench.experiment import read_prompts
    from tools.drafts.comparison import (
        Comparison,
        compare,
        comparison_data,
        comparison_picture,
        comparison_sheets,
        named,
    )

    loaded = [load_config(path, (), os.environ) for path in configs]
    comparison = Comparison(
        drafts=named(configs, loaded),
        prompts=tuple(each.prompt for each in read_prompts(prompts or BENCH_PROMPTS)),
        temperatures=tuple(temperature or (0.0,)),
        tokens=tokens,
        block_lens=tuple(sorted(block_len or (1, 2, 4, 8))),
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
        plot.write_text(comparison_picture(compared), encoding="utf-8")
