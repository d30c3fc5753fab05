"""`slipstream up`, `down` and the `serve deploy` file for a running Ray cluster; new API keys."""

import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from cluster.config import SlipstreamConfig, load_config

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; see `slipstream config schema`.")]
Override = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, as in --set target.tensor_parallel=3."),
]
RayAddress = Annotated[str, typer.Option(envvar="RAY_ADDRESS", help="Ray cluster; auto: one on this machine.")]


def up(
    config_path: ConfigFile,
    overrides: Override = None,
    address: RayAddress = "auto",
    autoscaled: Annotated[
        bool, typer.Option("--autoscaled", help="The cluster adds the nodes that are missing: wait for them.")
    ] = False,
) -> None:
    """Deploys CONFIG to a running Ray cluster, or updates what is deployed there, and returns once it answers."""
    console = Console(stderr=True)
    config = load(config_path, overrides)
    with console.status("Starting") as status:
        from serve_app.operations.rollout import up as put_up

        reached = put_up(config, address, status, autoscaled=autoscaled)
    if reached.differs is not None:
        console.print(reached.differs, soft_wrap=True)
    for url in reached.urls:
        typer.echo(f"Slipstream is up: {url}/v1 (model {config.model.name})")


def down(
    config_path: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="Its server.drain_s counts; without it, that of what is deployed."),
    ] = None,
    address: RayAddress = "auto",
) -> None:
    """Removes a deployment from its Ray cluster after its requests have finished."""
    drain_s = None if config_path is None else load(config_path, None).server.drain_s
    with Console(stderr=True).status("Stopping") as status:
        from serve_app.operations.rollout import down as take_down

        take_down(address, drain_s, status)
    typer.echo("Slipstream is down")


def serve_yaml(config_path: ConfigFile, overrides: Override = None) -> None:
    """Prints CONFIG as a file for `serve deploy`."""
    from serve_app.operations.checks import check_keys
    from serve_app.serve_manifest import whole_file

    config = load(config_path, overrides)
    check_keys(config.server)
    typer.echo(yaml.safe_dump(whole_file(config), sort_keys=False, width=120), nl=False)


def load(path: Path, overrides: list[str] | None) -> SlipstreamConfig:
    return load_config(path, overrides or (), os.environ)


KEY_BYTES = 32


def new_key() -> str:
    """Returns 256 random bits, so that the digest needs no salt."""
    return f"sk-{secrets.token_urlsafe(KEY_BYTES)}"


def key_lines(name: str, key: str) -> str:
    """Returns the configuration section for a key."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"server:\n  keys:\n    {name}: {{sha256: {digest}}}"
