"""The command line. Every command is thin: it reads the config, checks it, and hands over.

Modules that bring in torch or Ray are imported by the commands that need them, so that help and config stay quick.
"""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cluster.config import SlipstreamConfig, load_config
from cluster.errors import SlipstreamError

WRONG_INPUT = 2  # exit status

app = typer.Typer(
    help="Speculative decoding as a distributed system, behind one OpenAI-compatible endpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")

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
    from serve_app.cli.demo_models import demo_config, prepare_target

    console = Console()
    config = demo_config(_port_override(port))
    prepare_target(Path(config.model.target), console)
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
    config_path: ConfigPath,
    prompts: Annotated[Path | None, typer.Option(help='JSON lines {"kind", "prompt"}; default: the examples.')] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write all measurements here.")
    ] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once; repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="How often every prompt is run.")] = 1,
    generate: Annotated[bool, typer.Option("--generate", help="Third arm: plain Hugging Face generate.")] = False,
    port: Port = 0,
    overrides: Overrides = None,
    address: Address = None,
    verbose: Verbose = False,
) -> None:
    """Measures the same prompts and answer lengths with and without speculation, interleaved."""
    from serve_app.bench.experiment import DEFAULT_PROMPTS, Plan, read_prompts

    console = Console()
    config = _load(config_path, overrides, port)
    plan = Plan(read_prompts(prompts or DEFAULT_PROMPTS), tuple(concurrency or [1]), max_tokens, repeats)
    _check_models(config, console, with_weights=address is None)
    from serve_app.bench.experiment import run_bench
    from serve_app.operations.local import serving

    with serving(config, console, address=address, verbose=verbose) as url:
        report = asyncio.run(run_bench(url, config, plan, generate, console, json_path))
    console.print(report.tables())


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
) -> None:
    """Shows health, counters and deployments of a running Slipstream."""
    from serve_app.app import APPLICATION
    from serve_app.operations.published import live_costs
    from serve_app.operations.status import endpoint_status, ray_status

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
def plan(
    costs_path: Annotated[
        Path | None, typer.Option("--costs", metavar="COSTS", help="Measured costs as JSON, instead of the next five.")
    ] = None,
    target_step_ms: Annotated[float, typer.Option(min=0, help="A target step of one row and one token.")] = 20.0,
    target_token_ms: Annotated[float, typer.Option(min=0, help="Each further token of a step, of any row.")] = 0.1,
    draft_token_ms: Annotated[float, typer.Option(min=0, help="A draft token for one session.")] = 2.0,
    draft_row_ms: Annotated[float, typer.Option(min=0, help="The same for each further session in the pass.")] = 0.05,
    hop_ms: Annotated[float, typer.Option(min=0, help="A message, one way.")] = 0.3,
    acceptance: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=1,
            help="Of a draft token, given those before it; repeatable: by position in a block. "
            "The default is what was measured with the costs, or else 0.8.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Sessions at once on each target; the default is 8.")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0, help="Instead: requests a second for each target.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a request.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 64,
    block_len: Annotated[list[int] | None, typer.Option(min=1, help="Longest blocks to try; repeatable.")] = None,
    target_price: Annotated[float | None, typer.Option(min=0, help="Of one target replica, an hour.")] = None,
    drafter_price: Annotated[float | None, typer.Option(min=0, help="Of one drafter, an hour.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write everything here.")] = None,
    picture_path: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT", help="Write an SVG picture here.")
    ] = None,
    classroom: Annotated[
        bool, typer.Option("--classroom", help="Instead: what speculation brings, by formula and by simulation.")
    ] = False,
) -> None:
    """Simulates fleets under given costs and load, and says which one to take."""
    from serve_app.planning.plan_report import run_classroom, run_plan
    from serve_app.planning.plan_request import PlanRequest, StatedCosts

    console = Console()
    if classroom:
        run_classroom(console)
        return
    stated = StatedCosts(target_step_ms, target_token_ms, draft_token_ms, draft_row_ms, hop_ms)
    request = PlanRequest(
        costs_path,
        stated,
        acceptance,
        concurrency,
        rate,
        prompt_tokens,
        new_tokens,
        block_len,
        target_price,
        drafter_price,
    )
    run_plan(request.question(), console, json_path, picture_path)


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


def _port_override(port: int | None) -> list[str]:
    return [] if port is None else [f"server.port={port}"]


def _check_models(config: SlipstreamConfig, console: Console, *, with_weights: bool = False) -> None:
    with console.status("Checking the models"):
        from serve_app.operations.preflight import check_models

        check_models(config, with_weights=with_weights)
