"""`slipstream k8s`: manifests of a deployment on Kubernetes."""

import os
from pathlib import Path
from typing import Annotated

import typer

k8s_app = typer.Typer(help="Deploy on Kubernetes.", no_args_is_help=True)


@k8s_app.callback()
def _group() -> None:
    """Keeps `render` a subcommand: Typer would merge a group with its only command."""


@k8s_app.command()
def render(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key; goes into the manifests.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write to; default: the one of CONFIG.")
    ] = None,
) -> None:
    """Writes the manifests of CONFIG beside it, for `kubectl apply -k`."""
    from cluster.config import load_config
    from tools.kubernetes.rendering import render_into

    config = load_config(config_path, overrides or (), os.environ)
    folder = out or config_path.parent
    names = render_into(config, config_path.name, folder)
    typer.echo(f"{', '.join(names)} are in {folder}")
