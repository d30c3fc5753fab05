"""Commands that serve: each reads the configuration, checks it and hands over. `tools/cli.py` adds the others.

Modules that import torch or Ray are imported by the commands that need them, so that help and config stay quick.
"""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cluster.config import SlipstreamConfig, load_config
from cluster.errors import SlipstreamError
from serve_app.cli.chat import ApiKey, chat
from serve_app.cli.running import down, serve_yaml, up

WRONG_INPUT = 2  # exit status
DISTRIBUTION = "slipstream-serving"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.command()(up)
app.command()(down)
config_app.command("serve")(serve_yaml)
app.command()(chat)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; see `slipstream config schema`.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, as in --set target.tensor_parallel=3."),
]
Port = Annotated[int | None, typer.Option(help="HTTP port instead of server.port; 0 takes any free one.")]
Address = Annotated[
    str | None, typer.Option(envvar="RAY_ADDRESS", help="Ray cluster to run on; without it a local one is started.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the logs of Ray and of every process.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding as a distributed system, behind one OpenAI-compatible endpoint."""


def main() -> None:
    """Runs the command line; deliberate errors become one message on stderr."""
    try:
        app()
    except SlipstreamError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(WRONG_INPUT) from None


@app.command()
def demo(port: Port = None, verbose: Verbose = False) -> None:
    """Prepares the demo models, starts everything, answers three prompts and shows what speculation did."""
    from serve_app.cli.demo import run_demo

    console = Console()
    config = load_demo(None, port, console)
    check_models_of(config, console)
    from serve_app.operations.local import serving

    with serving(config, console, verbose=verbose) as url:
        asyncio.run(run_demo(url, console))


@app.command()
def prepare_demo() -> None:
    """Prepares the demo's target model, once."""
    from serve_app.cli.demo import demo_config, prepare_target

    folder = Path(demo_config().model.target)
    prepare_target(folder, Console())
    typer.echo(f"The demo's target model is in {folder}")


@app.command()
def serve(
    config_path: ConfigPath,
    port: Port = None,
    overrides: Overrides = None,
    address: Address = None,
    verbose: Verbose = False,
) -> None:
    """Serves CONFIG until Ctrl-C, which lets running requests finish."""
    console = Console(stderr=True)
    config = load(config_path, overrides, port)
    check_models_of(config, console, with_weights=address is None)
    from serve_app.operations.local import serving

    with suppress(KeyboardInterrupt), serving(config, console, address=address, verbose=verbose) as url:
        typer.echo(f"Slipstream is ready: {url}/v1 (model {config.model.name})")
        signal.pause()


@app.command()
def status(
    url: Annotated[str, typer.Option(help="Base URL of the endpoint.")] = "http://127.0.0.1:8000",
    address: Annotated[
        str, typer.Option(envvar="RAY_ADDRESS", help="Ray cluster; auto: one on this machine.")
    ] = "auto",
    costs_path: Annotated[
        Path | None,
        typer.Option("--costs", metavar="OUT", help="Write what was measured here, for `plan --costs`."),
    ] = None,
    watching: Annotated[
        bool, typer.Option("--watch", help="Show what the live page shows, again every second, until Ctrl-C.")
    ] = False,
    key: ApiKey = None,
) -> None:
    """Shows health, counters and deployments of a running Slipstream."""
    if watching:
        from serve_app.status import watch

        with suppress(KeyboardInterrupt):
            asyncio.run(watch(url, key, Console()))
        return
    from serve_app.app import APPLICATION
    from serve_app.operations.ray_cluster import live_costs
    from serve_app.status import endpoint_status, ray_status

    console = Console()
    with console.status("Asking the endpoint"):
        table = asyncio.run(endpoint_status(url))
    console.print(table)
    with console.status("Asking Ray"):
        deployments = ray_status(address, APPLICATION)
    console.print(deployments)
    if costs_path is not None:
        with console.status("Asking the replicas"):
            costs = live_costs(address, APPLICATION)
        costs.save(costs_path)
        what = "costs" if costs.acceptance is None else "costs, and acceptance by position,"
        typer.echo(f"The {what} are in {costs_path}")


@app.command()
def key(name: Annotated[str, typer.Argument(help="Whose key it is, as the configuration is to call it.")]) -> None:
    """Creates an API key, shown once, and prints the configuration section for it."""
    from serve_app.cli.running import key_lines, new_key

    made = new_key()
    typer.echo(f"{made}\n\n{key_lines(name, made)}")


@config_app.command()
def schema() -> None:
    """Prints the JSON schema of the configuration."""
    typer.echo(json.dumps(SlipstreamConfig.model_json_schema(), indent=2))


@config_app.command()
def check(
    config_path: ConfigPath,
    overrides: Overrides = None,
    models: Annotated[bool, typer.Option("--models", help="Check the models that it names too.")] = False,
) -> None:
    """Checks CONFIG, and with --models its checkpoints, and reports every problem."""
    config = load(config_path, overrides)
    if models:
        for line in check_models_of(config, Console(stderr=True)):
            typer.echo(line)
    typer.echo(f"{config_path} is right")


def load(path: Path, overrides: Sequence[str] | None, port: int | None = None) -> SlipstreamConfig:
    return load_config(path, [*(overrides or []), *_port_override(port)], os.environ)


def load_demo(overrides: Sequence[str] | None, port: int | None, console: Console) -> SlipstreamConfig:
    """Returns the demo's configuration, after preparing its target model."""
    from serve_app.cli.demo import demo_config, prepare_target

    config = demo_config([*(overrides or []), *_port_override(port)], os.environ)
    prepare_target(Path(config.model.target), console)
    return config


def _port_override(port: int | None) -> list[str]:
    return [] if port is None else [f"server.port={port}"]


def check_models_of(config: SlipstreamConfig, console: Console, *, with_weights: bool = False) -> list[str]:
    """Returns report lines. Raises ModelError for models that cannot be served."""
    with console.status("Checking the models"):
        from serve_app.operations.preflight import check_models

        return check_models(config, with_weights=with_weights)
