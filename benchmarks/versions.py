"""Compares the throughput of two checkouts of this repository, before and after a change.

    python benchmarks/versions.py --before ../older [--concurrency 1,4,16] [--rounds 5] [--tokens 64] [--json OUT]
    python benchmarks/versions.py --before ../older --temperature 1 --plain

Each checkout serves the demo pair with its own code, config and draft, from its own Ray cluster; target and drafter are
pinned to one core each, as in `pipeline.py`. Both receive the same prompts over HTTP, one checkout after the other in
alternating order. An interval that contains 1 means no measurable difference. `--plain` adds non-speculative decoding
on the newer checkout.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track
from servers import OTHERS_CORE, PINNED

from serve_app.demo_data import BENCH_PROMPTS
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Tally, TimedAnswer
from tools.bench.experiment import WARM_UP_TOKENS, Prompt, prompt_batches, read_prompts
from tools.bench.latencies import Batch, Speedup, speedup
from tools.bench.tables import speedups_table

ARMS = ("after", "before")
PLAIN = "plain"  # newer checkout, without speculation
CONFIGS = ("serve_app/demo_data/smollm2.yaml", "examples/smollm2.yaml")  # demo configs, newest path first
START_S = 300.0
TURNOVER = 3  # prompts in a batch, per concurrent request
READY = re.compile(r"is ready: (http://\S+)/v1")


def command_of(checkout: Path) -> list[str]:
    """Returns the command of `slipstream serve` in a checkout; finds its entry point in pyproject.toml."""
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["slipstream"].partition(":")
    config = next(path for path in CONFIGS if (checkout / path).is_file())
    settings = [part for setting in PINNED for part in ("--set", setting)]
    return [sys.executable, "-c", f"from {module} import {function}; {function}()", "serve", config, *settings]


@contextmanager
def served(checkout: Path) -> Iterator[str]:
    """Runs a server from the checkout; yields its URL and stops it on exit."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = ["taskset", "--cpu-list", str(OTHERS_CORE), *command_of(checkout)]
    process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        began = time.monotonic()
        for line in process.stdout:
            if found := READY.search(line):
                yield found[1]
                return
            if time.monotonic() - began > START_S:
                break
        raise SystemExit(f"{checkout} was not ready within {START_S:.0f} s; see its output above")
    finally:
        process.terminate()
        process.wait(timeout=60)


async def batch_of(
    endpoint: ChatEndpoint,
    arm: str,
    prompts: Sequence[Prompt],
    at_once: int,
    tokens: int,
    temperature: float,
    index: int,
    number: int,
) -> Batch:
    model = await endpoint.model()
    places = asyncio.Semaphore(at_once)
    most = 0 if arm == PLAIN else None
    began = time.perf_counter()

    async def ask(prompt: Prompt) -> TimedAnswer:
        async with places:
            return await endpoint.ask(model, ChatQuestion(prompt.prompt, tokens, True, most, temperature))

    answers = await asyncio.gather(*map(ask, prompts))
    seconds = time.perf_counter() - began
    kinds = tuple(prompt.kind for prompt in prompts)
    return Batch(arm, at_once, index, number, seconds, Tally(), kinds, tuple(answers))


async def measure(urls: Mapping[str, str], arguments: argparse.Namespace, prompts: Sequence[Prompt]) -> list[Batch]:
    """Runs all rounds at all concurrencies, alternating the checkouts batch by batch."""
    batches: list[Batch] = []
    asked = (arguments.tokens, arguments.temperature)
    arms = arms_of(arguments)
    async with AsyncExitStack() as stack:
        endpoints = {arm: await stack.enter_async_context(ChatEndpoint.at(url)) for arm, url in urls.items()}
        for arm, endpoint in endpoints.items():
            await batch_of(endpoint, arm, prompts, len(prompts), WARM_UP_TOKENS, arguments.temperature, 0, -1)
        for number in range(arguments.rounds):
            for at_once in arguments.concurrency:
                order = random.Random(number).sample(list(prompts), len(prompts))
                parts = prompt_batches(order if at_once > 1 else prompts, 1 if at_once == 1 else TURNOVER * at_once)
                for place, part in enumerate(
                    track(parts, f"Round {number + 1}, {at_once}", console=Console(stderr=True))
                ):
                    index = place if at_once == 1 else number * len(parts) + place
                    first = (number + place) % len(arms)
                    for arm in arms[first:] + arms[:first]:
                        endpoint = endpoints["after" if arm == PLAIN else arm]
                        batches.append(await batch_of(endpoint, arm, part, at_once, *asked, index, number))
                show(arguments, batches)
    return batches


def arms_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    return (*ARMS, PLAIN) if arguments.plain else ARMS


def speedups(arguments: argparse.Namespace, batches: Sequence[Batch]) -> list[Speedup]:
    """Returns the throughput of `after` relative to `before` and to non-speculative decoding, per concurrency."""
    found = []
    for at_once in arguments.concurrency:
        of = {arm: [b for b in batches if (b.arm, b.concurrency) == (arm, at_once)] for arm in arms_of(arguments)}
        if len({batch.index for batch in of["after"]}) > 1:
            found += [speedup(of["after"], of[base]) for base in arms_of(arguments)[1:]]
    return found


def show(arguments: argparse.Namespace, batches: Sequence[Batch]) -> None:
    found = speedups(arguments, batches)
    if found:
        Console().print(speedups_table(found))
    if arguments.json:
        data = {"speedups": [asdict(one) for one in found], "batches": [asdict(batch) for batch in batches]}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder of the older checkout")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true", help="also compare with non-speculative decoding")
    parser.add_argument("--prompts", type=Path, default=BENCH_PROMPTS)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements here, after each concurrency")
    arguments = parser.parse_args()
    arguments.concurrency = [int(part) for part in arguments.concurrency.split(",")]
    prompts = read_prompts(arguments.prompts)
    os.sched_setaffinity(0, [OTHERS_CORE])
    here = Path(__file__).resolve().parents[1]
    with served(here) as after, served(arguments.before.resolve()) as before:
        asyncio.run(measure({"after": after, "before": before}, arguments, prompts))


if __name__ == "__main__":
    main()
