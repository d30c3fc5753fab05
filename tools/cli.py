"""The `slipstream` command: combines the commands of `serve_app` and of the tools.

Commands import torch and Ray only if needed, so that help stays fast.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.errors import ConfigError
from serve_app.cli.chat import ApiKey
from serve_app.cli.main import (
    Address,
    ConfigPath,
    Overrides,
    Port,
    RayAddress,
    Verbose,
    app,
    check_models_of,
    load,
    load_demo,
    load_single,
    main,
    writable_path,
)
from tools.drafts.command import drafts_app
from tools.kubernetes.rendering import k8s_app
from tools.learn import learn_app
from tools.planning.command import plan

__all__ = ["app", "main"]

DEFAULT_REQUESTS = 60  # requests of `slipstream bench` per rate
CHECK_FAILED = 1  # exit status of `slipstream doctor` when a check fails

app.add_typer(drafts_app, name="drafts")
app.add_typer(k8s_app, name="k8s")
app.add_typer(learn_app, name="learn")
app.command()(plan)


@app.command()
def bench(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML file; default: the demo's configuration.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines {"kind", "prompt"}; default: 24 prompts of six kinds.')
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Prompts from a data set: JSON lines of prompts or messages, or ShareGPT."),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="OUT", callback=writable_path, help="Write all measurements to this file."),
    ] = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", metavar="OUT", callback=writable_path, help="Write a report with charts to this file."),
    ] = None,
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="Concurrent requests; repeatable.")] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=0.001, help="Poisson arrivals: requests per second; repeatable."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=2, help="With --rate: number of requests per rate; default: 60.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 96,
    repeats: Annotated[int | None, typer.Option(min=1, help="Number of runs per prompt; default: 1.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Also measure Hugging Face generate.")] = False,
    url: Annotated[
        str | None, typer.Option(help="With --rate: measure this running endpoint instead of CONFIG.")
    ] = None,
    key: ApiKey = None,
    port: Port = None,
    overrides: Overrides = None,
    address: Address = None,
    verbose: Verbose = False,
) -> None:
    """Measures the same prompts and answer lengths with and without speculation, interleaved."""
    from serve_app.demo_data import BENCH_PROMPTS
    from tools.bench.experiment import Plan, read_prompts
    from tools.bench.reports import measure_rates, report_on_batches
    from tools.progress import log_phase

    batch_options = {"--concurrency": concurrency, "--repeats": repeats, "--generate": generate or None}
    if dataset is not None:
        _refuse_with("--dataset", {"--prompts": prompts})
    if rate:
        _refuse_with("--rate", batch_options)
    elif url is None and requests is not None:
        raise ConfigError("--requests needs --rate; give a rate, or leave it out")
    if url is not None:
        served = {"CONFIG": config_path, "--set": overrides, "--port": port, "--address": address}
        if address == os.environ.get("RAY_ADDRESS"):
            served["--address"] = None
        _refuse_with("--url", {**served, **batch_options})
    requests = DEFAULT_REQUESTS if requests is None else requests
    console = Console()
    plan = Plan(read_prompts(dataset or prompts or BENCH_PROMPTS), tuple(concurrency or [1]), max_tokens, repeats or 1)
    paths = json_path, html_path
    if url is not None:
        measure_rates(url, key, plan, rate or [], requests, console, *paths)
        return
    if port is None and address is None:
        port = 0  # a temporary local server may use any port
    config = load_demo(overrides, port, console) if config_path is None else load_single(config_path, overrides, port)
    check_models_of(config, console, with_weights=address is None)
    from serve_app.operations.checks import on_loopback
    from serve_app.operations.local import serving

    config = on_loopback(config)
    log_phase(console, "Starting Slipstream and loading the models")
    with serving(config, console, address=address, verbose=verbose) as served_at:
        if rate:
            measure_rates(served_at, key, plan, rate, requests, console, *paths)
        else:
            report_on_batches(served_at, config, plan, generate, console, *paths)


def _refuse_with(option: str, others: Mapping[str, object]) -> None:
    """Raises ConfigError if any other option is given, which `option` would ignore."""
    for name, value in others.items():
        if value is not None and value != []:
            raise ConfigError(f"{option} does not use {name}; leave one of them out")


@app.command()
def trace(
    json_path: Annotated[
        Path,
        typer.Argument(metavar="OUT", callback=writable_path, help="Chrome trace; open it at https://ui.perfetto.dev."),
    ],
    picture_path: Annotated[
        Path | None,
        typer.Option(
            "--gantt", metavar="OUT", callback=writable_path, help="Write an SVG chart of a window to this file."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Length of the window.")] = 1.0,
    ends_before: Annotated[float, typer.Option(min=0, help="Seconds from the window's end to the latest span.")] = 0.0,
    address: RayAddress = "auto",
) -> None:
    """Writes the latest spans of a running Slipstream's actors, and shows the duration of each stage."""
    from cluster.telemetry import spans
    from serve_app.app import APPLICATION
    from serve_app.operations.ray_cluster import live_actors
    from tools.trace import stages_table, write_trace

    console = Console()
    with console.status("Reading the replicas"):
        actors = live_actors(address, APPLICATION)
    found = spans(actors)
    write_trace(found, json_path, picture_path, seconds, ends_before)
    console.print(stages_table(found))
    typer.echo(f"Wrote {len(found)} spans of {len(actors)} actors to {json_path}")


@app.command()
def doctor(config_path: ConfigPath, overrides: Overrides = None, address: RayAddress = "auto") -> None:
    """Examines every node of a running Ray cluster for CONFIG, and reports faults with their fixes.

    The exit status is 0 without faults, else 1.
    """
    config = load(config_path, overrides)
    with Console(stderr=True).status("Examining the nodes"):
        from tools.doctor.checks import report, run_checks
        from tools.doctor.probe import examine

        checks = run_checks(config, examine(config, address))
    Console(soft_wrap=True).print(report(checks))
    if any(check.faults for check in checks):
        raise typer.Exit(CHECK_FAILED)
