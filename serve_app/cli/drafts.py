"""`slipstream drafts`: what a draft checkpoint is and whether it fits, and what drafts bring, side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.errors import ModelError

DOES_NOT_FIT = 1  # exit status

drafts_app = typer.Typer(help="Look at draft checkpoints, and compare drafts.", no_args_is_help=True)


@drafts_app.command()
def inspect(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Draft checkpoint: a folder.")],
    target: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Target to draft for: a folder, or a Hugging Face id."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Says what a draft checkpoint is, what it needs and how to configure it; exit status 1: it does not fit."""
    from actors.methods.inspection.draft_inspection import inspect_draft
    from actors.models.checkpoint import local_folder
    from serve_app.cli.draft_sheets import inspection_data, inspection_report

    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelError(f"there is no folder {path}; download the checkpoint first")
    found = inspect_draft(path, local_folder(target, with_weights=False) if target else None)
    if as_json:
        typer.echo(json.dumps(inspection_data(found), indent=1))
    else:
        Console().print(inspection_report(found), soft_wrap=True)
    if not found.fits:
        raise typer.Exit(DOES_NOT_FIT)
