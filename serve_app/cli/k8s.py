"""`slipstream k8s`: the manifests of a deployment on Kubernetes."""

import os
from pathlib import Path
from typing import Annotated

import typer

k8s_app = typer.Typer(help="Deploy on Kubernetes.", no_args_is_help=True)


@k8s_app.callback()
def _group() -> None:
    """Without it, Typer would take the group's only command for the group."""


@k8s_app.command()
def render(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, in a folder of k8s/overlays.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key; goes into the manifests.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Another folder of k8s/overlays to write to.")
    ] = None,
) -> None:
    """Writes the manifests of CONFIG beside it, for `kubectl apply -k`."""
    from cluster.config import load_config
    from serve_app.kubernetes.rendering import rendered, write

    config = load_config(config_path, overrides or (), os.environ)
    folder = out or config_path.parent
    files = rendered(config, config_path.name)
    write(files, folder)
    typer.echo(f"{', '.join(files)} are in {folder}")
