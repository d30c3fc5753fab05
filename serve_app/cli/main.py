"""Commands that serve, deploy and inspect. `tools/cli.py` adds the other commands.

Commands import torch and Ray only if needed, so that help and `config` stay fast.
"""

import asyncio
import hashlib
import json
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from cluster.config import ENVIRONMENT_PREFIX, SlipstreamConfig, load_config
from cluster.errors import ConfigError, SlipstreamError
from serve_app.cli.chat import ApiKey, chat

INVALID_INPUT = 2  # exit status for invalid input
KEY_BYTES = 32
DISTRIBUTION = "slipstream-serving"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check and print configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.command()(chat)

ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="Configuration file in YAML; `slipstream config schema` lists its keys."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as target.tensor_parallel=3; repeatable."),
]
Port = Annotated[int | None, typer.Option(help="HTTP port, instead of server.port; 0: any free port.")]
Address = Annotated[
    str | None, typer.Option(envvar="RAY_ADDRESS", help="Address of the Ray cluster; default: start a local one.")
]
RayAddress = Annotated[
    str, typer.Option(envvar="RAY_ADDRESS", help="Address of the Ray cluster; auto finds one on this machine.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the logs of Ray and of every process.")]


def writable_path(path: Path | None) -> Path | None:
    """Returns the path of an output option. Raises ConfigError before any work if its folder does not exist."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; create it, or choose another path")
    return path


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
    """Runs the command line; prints expected errors as one message on stderr."""
    try:
        app()
    except SlipstreamError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(INVALID_INPUT) from None


@app.command()
def demo(
    learn: Annotated[
        bool, typer.Option("--learn", help="Serve support requests, and train the draft on them.")
    ] = False,
    port: Port = None,
    verbose: Verbose = False,
) -> None:
    """Runs the demo: prepares and serves its models, answers three prompts, and shows the speedup from speculation."""
    console = Console()
    if learn:
        _demo_of_learning(port, verbose, console)
        return
    from serve_app.cli.demo import run_demo

    config = load_demo(None, port, console, SHOWN_DEFAULTS)
    check_models_of(config, console)
    from serve_app.operations.local import serving

    with serving(config, console, verbose=verbose) as url:
        asyncio.run(run_demo(url, console))


def _demo_of_learning(port: int | None, verbose: bool, console: Console) -> None:
    from actors.learning.versions import VersionFolder
    from serve_app.cli.learning_demo import OVERRIDES, figures, run_learning_demo
    from serve_app.demo_data import REPLAY

    with TemporaryDirectory() as folder:
        learning = (f"draft.learning.folder={folder}", f"draft.learning.replay={REPLAY}", *OVERRIDES)
        config = load_demo(learning, port, console)
        check_models_of(config, console)
        from serve_app.operations.local import serving

        with serving(config, console, verbose=verbose) as url:
            asyncio.run(run_learning_demo(url, console))
        console.print(figures(VersionFolder(Path(folder)).history()[-1]))


@app.command()
def prepare_demo() -> None:
    """Prepares the demo's target model unless it exists."""
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
    """Serves CONFIG on this machine or a Ray cluster until Ctrl-C, then waits for running requests."""
    console = Console(stderr=True)
    config = load(config_path, overrides, port)
    from serve_app.operations.checks import check_keys
    from serve_app.operations.local import checked_port, serving

    check_keys(config.server)  # these two before the models, which may take hours to download
    if address is None:
        checked_port(config.server.host, config.server.port)
    check_models_of(config, console, with_weights=address is None)
    with suppress(KeyboardInterrupt), serving(config, console, address=address, verbose=verbose) as url:
        typer.echo(f"Slipstream is ready: {url}/v1 ({_served(config)})")
        signal.pause()


@app.command()
def up(
    config_path: ConfigPath,
    overrides: Overrides = None,
    address: RayAddress = "auto",
    autoscaled: Annotated[
        bool, typer.Option("--autoscaled", help="Wait for nodes that the cluster's autoscaler adds.")
    ] = False,
) -> None:
    """Deploys CONFIG to a running Ray cluster, or updates the deployment; returns once it answers requests."""
    console = Console(stderr=True)
    config = load(config_path, overrides)
    with console.status("Starting") as status:
        from serve_app.operations.rollout import up as put_up

        reached = put_up(config, address, status, autoscaled=autoscaled)
    if reached.difference is not None:
        console.print(reached.difference, soft_wrap=True)
    for url in reached.urls:
        typer.echo(f"Slipstream is up: {url}/v1 ({_served(config)})")


@app.command()
def down(
    config_path: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="Take server.drain_s from this file; default: from the deployment."),
    ] = None,
    address: RayAddress = "auto",
) -> None:
    """Removes the deployment from a Ray cluster after its running requests have finished."""
    drain_s = None if config_path is None else load(config_path, None).server.drain_s
    with Console(stderr=True).status("Stopping") as status:
        from serve_app.operations.rollout import down as take_down

        take_down(address, drain_s, status)
    typer.echo("Slipstream is down")


@app.command()
def status(
    url: Annotated[str, typer.Option(help="Base URL of the endpoint.")] = "http://127.0.0.1:8000",
    address: RayAddress = "auto",
    costs_path: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="OUT",
            callback=writable_path,
            help="Write the measured costs to this file, for `slipstream plan --costs`.",
        ),
    ] = None,
    watching: Annotated[
        bool, typer.Option("--watch", help="Show the live page's content, updated every second, until Ctrl-C.")
    ] = False,
    key: ApiKey = None,
) -> None:
    """Shows the health, counters and deployments of a running Slipstream."""
    if watching:
        from serve_app.status import watch

        with suppress(KeyboardInterrupt):
            asyncio.run(watch(url, key, Console()))
        return
    from serve_app.app import APPLICATION
    from serve_app.operations.ray_cluster import live_costs
    from serve_app.status import endpoint_status, ray_status

    console = Console()
    with console.status("Reading the endpoint"):
        table = asyncio.run(endpoint_status(url))
    console.print(table)
    with console.status("Asking Ray"):
        deployments = ray_status(address, APPLICATION)
    console.print(deployments)
    if costs_path is not None:
        with console.status("Reading the replicas"):
            costs = live_costs(address, APPLICATION)
        costs.save(costs_path)
        what = "costs" if costs.acceptance is None else "costs, and acceptance by position,"
        typer.echo(f"The {what} are in {costs_path}")


@app.command()
def key(name: Annotated[str, typer.Argument(help="Name of the key's holder in the configuration.")]) -> None:
    """Creates an API key, shown once, and prints the configuration section for it."""
    new = new_key()
    typer.echo(f"{new}\n\n{key_lines(name, new)}")


def new_key() -> str:
    """Returns a key of 256 random bits; its digest needs no salt."""
    return f"sk-{secrets.token_urlsafe(KEY_BYTES)}"


def key_lines(name: str, key: str) -> str:
    """Returns the configuration section for a key."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"server:\n  keys:\n    {name}: {{sha256: {digest}}}"


@config_app.command()
def schema() -> None:
    """Prints the JSON schema of the configuration."""
    typer.echo(json.dumps(SlipstreamConfig.model_json_schema(), indent=2))


@config_app.command()
def check(
    config_path: ConfigPath,
    overrides: Overrides = None,
    models: Annotated[bool, typer.Option("--models", help="Also check the files of its models.")] = False,
) -> None:
    """Checks CONFIG, and with --models its checkpoints; reports every problem."""
    from serve_app.operations.checks import check_keys

    config = load(config_path, overrides)
    check_keys(config.server)
    if models:
        for line in check_models_of(config, Console(stderr=True)):
            typer.echo(line)
    typer.echo(f"{config_path} is valid")


@config_app.command("serve")
def serve_yaml(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Prints CONFIG as a config file for Ray's `serve deploy`."""
    from serve_app.operations.checks import check_keys
    from serve_app.serve_manifest import deploy_file

    config = load(config_path, overrides)
    check_keys(config.server)
    typer.echo(yaml.safe_dump(deploy_file(config), sort_keys=False, width=120), nl=False)


def load(path: Path, overrides: Sequence[str] | None, port: int | None = None) -> SlipstreamConfig:
    return load_config(path, [*(overrides or []), *_port_override(port)], os.environ)


def load_single(path: Path, overrides: Sequence[str] | None, port: int | None = None) -> SlipstreamConfig:
    """Loads a configuration for a command that handles a single model. Raises ConfigError for several models."""
    config = load(path, overrides, port)
    if config.models:
        raise ConfigError(f"{path} has several models; this command needs a configuration with one model")
    return config


def _served(config: SlipstreamConfig) -> str:
    names = [one.name for one in config.served]
    return f"model{'s' if len(names) > 1 else ''} {', '.join(names)}"


# Default variables of `slipstream demo`: with invariant numerics, its answers are equal in bfloat16.
SHOWN_DEFAULTS = MappingProxyType({f"{ENVIRONMENT_PREFIX}MODEL__NUMERICS": "invariant"})


def load_demo(
    overrides: Sequence[str] | None,
    port: int | None,
    console: Console,
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> SlipstreamConfig:
    """Returns the demo's configuration, with its target model prepared, in a dtype that this processor multiplies fast.

    `defaults` are environment variables; those that are set win.
    """
    from serve_app.cli.demo import demo_config, fast_dtype, prepare_target

    environment = {f"{ENVIRONMENT_PREFIX}MODEL__DTYPE": fast_dtype(), **defaults, **os.environ}
    config = demo_config([*(overrides or []), *_port_override(port)], environment)
    prepare_target(Path(config.model.target), console)
    return config


def _port_override(port: int | None) -> list[str]:
    return [] if port is None else [f"server.port={port}"]


def check_models_of(config: SlipstreamConfig, console: Console, *, with_weights: bool = False) -> list[str]:
    """Returns descriptions of the models. Raises ModelError if they cannot be served."""
    with console.status("Checking the models"):
        from serve_app.operations.preflight import check_models

        return check_models(config, with_weights=with_weights)
