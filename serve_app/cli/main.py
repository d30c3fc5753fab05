"""The command line. Every command is thin: it reads the config, checks it, and hands over.

Modules that bring in torch or Ray are imported by the commands that need them, so that help and config stay quick.
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
from serve_app.cli.drafts import drafts_app
from serve_app.cli.k8s import k8s_app
from serve_app.cli.plan_options import plan
from serve_app.cli.running import doctor, down, serve_yaml, up

WRONG_INPUT = 2  # exit status
DISTRIBUTION = "slipstream-serving"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(drafts_app, name="drafts")
app.add_typer(k8s_app, name="k8s")
app.command()(plan)
app.command()(up)
app.command()(down)
app.command()(doctor)
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
    """Runs the command line; deliberate errors are one message on stderr."""
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
    config = _load_demo(None, port, console)
    _check_models(config, console)
    from serve_app.operations.local import serving

    with serving(config, console, verbose=verbose) as url:
        asyncio.run(run_demo(url, console))


@app.command()
def prepare_demo() -> None:
    """Prepares the demo's target model, once."""
    from serve_app.cli.demo_models import demo_config, prepare_target

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
    config = _load(config_path, overrides, port)
    _check_models(config, console, with_weights=address is None)
    from serve_app.operations.local import serving

    with suppress(KeyboardInterrupt), serving(config, console, address=address, verbose=verbose) as url:
        typer.echo(f"Slipstream is ready: {url}/v1 (model {config.model.name})")
        signal.pause()


@app.command()
def bench(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML file; without it the demo's pair is measured.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines {"kind", "prompt"}; default: 24 prompts of six kinds.')
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Prompts as data sets have them: JSON lines of prompts or messages, or ShareGPT."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write all measurements here.")
    ] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Write a report with curves here.")
    ] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; repeatable.")] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=0.001, help="Instead: requests a second, which come by chance; repeatable."),
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests at each rate.")] = 60,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="How often every prompt is run.")] = 1,
    generate: Annotated[bool, typer.Option("--generate", help="Third arm: plain Hugging Face generate.")] = False,
    url: Annotated[
        str | None, typer.Option(help="With --rate: an endpoint that runs already, instead of starting CONFIG.")
    ] = None,
    key: ApiKey = None,
    port: Port = 0,
    overrides: Overrides = None,
    address: Address = None,
    verbose: Verbose = False,
) -> None:
    """Measures the same prompts and answer lengths with and without speculation, interleaved."""
    from serve_app.bench.datasets import read_dataset
    from serve_app.bench.experiment import Plan, read_prompts
    from serve_app.cli.bench_reports import measure_rates, report_on_batches
    from serve_app.demo_data import BENCH_PROMPTS

    console = Console()
    asked = read_dataset(dataset) if dataset is not None else read_prompts(prompts or BENCH_PROMPTS)
    plan = Plan(asked, tuple(concurrency or [1]), max_tokens, repeats)
    paths = json_path, html_path
    if url is not None:
        measure_rates(url, key, plan, rate or [], requests, console, *paths)
        return
    config = _load_demo(overrides, port, console) if config_path is None else _load(config_path, overrides, port)
    _check_models(config, console, with_weights=address is None)
    from serve_app.operations.local import serving
    from serve_app.operations.publicity import for_this_machine

    config = for_this_machine(config)
    with serving(config, console, address=address, verbose=verbose) as served_at:
        if rate:
            measure_rates(served_at, key, plan, rate, requests, console, *paths)
        else:
            report_on_batches(served_at, config, plan, generate, console, *paths)


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
        from serve_app.status.watching import watch

        with suppress(KeyboardInterrupt):
            asyncio.run(watch(url, key, Console()))
        return
    from serve_app.app import APPLICATION
    from serve_app.operations.published import live_costs
    from serve_app.status.status import endpoint_status, ray_status

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
def trace(
    json_path: Annotated[Path, typer.Argument(metavar="OUT", help="Chrome trace; open it at https://ui.perfetto.dev.")],
    picture_path: Annotated[
        Path | None, typer.Option("--gantt", metavar="OUT", help="Write an SVG picture of a window here.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Length of the window.")] = 1.0,
    ends_before: Annotated[float, typer.Option(min=0, help="Seconds from the window's end to the latest span.")] = 0.0,
    address: Annotated[
        str, typer.Option(envvar="RAY_ADDRESS", help="Ray cluster; auto: one on this machine.")
    ] = "auto",
) -> None:
    """Writes what the actors of a running Slipstream did last, span by span, and shows how long each stage took."""
    from cluster.telemetry import spans
    from serve_app.app import APPLICATION
    from serve_app.operations.trace import live_actors, stages_table, write_trace

    console = Console()
    with console.status("Asking the replicas"):
        actors = live_actors(address, APPLICATION)
    found = spans(actors)
    write_trace(found, json_path, picture_path, seconds, ends_before)
    console.print(stages_table(found))
    typer.echo(f"{len(found)} spans of {len(actors)} actors are in {json_path}")


@app.command()
def key(name: Annotated[str, typer.Argument(help="Whose key it is, as the configuration is to call it.")]) -> None:
    """Makes an API key, which is shown once, and prints what the configuration is to hold of it."""
    from serve_app.cli.key import key_lines, new_key

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
    """Says whether CONFIG is right, and what is wrong with it."""
    config = _load(config_path, overrides)
    if models:
        _check_models(config, Console(stderr=True))
    typer.echo(f"{config_path} is right")


def _load(path: Path, overrides: Sequence[str] | None, port: int | None = None) -> SlipstreamConfig:
    return load_config(path, [*(overrides or []), *_port_override(port)], os.environ)


def _load_demo(overrides: Sequence[str] | None, port: int | None, console: Console) -> SlipstreamConfig:
    """The demo's config, once its target model is there."""
    from serve_app.cli.demo_models import demo_config, prepare_target

    config = demo_config([*(overrides or []), *_port_override(port)], os.environ)
    prepare_target(Path(config.model.target), console)
    return config


def _port_override(port: int | None) -> list[str]:
    return [] if port is None else [f"server.port={port}"]


def _check_models(config: SlipstreamConfig, console: Console, *, with_weights: bool = False) -> None:
    with console.status("Checking the models"):
        from serve_app.operations.preflight import check_models

        check_models(config, with_weights=with_weights)
