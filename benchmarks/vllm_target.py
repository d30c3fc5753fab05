"""Compares vLLM behind a draft pool with vLLM alone: four arms on the same pair, in alternation.

    python benchmarks/vllm_target.py TARGET --draft DRAFT [--concurrency 1 4 16] [--rounds 3] [--json FILE]

The arms are vLLM without speculation, vLLM with its own draft_model speculation, Slipstream with a vLLM target, and
Slipstream with its own engine. All decode the prompts of `slipstream bench` greedily, batch by batch, and only one arm
runs at a time. vLLM's own arms are called in-process; Slipstream's use a router and gRPC, with the drafter in a
separate process. `--vllm` sets engine arguments of all vLLM arms: '{"enforce_eager": true}' skips compilation.

On a GPU, first compare the two arms without Slipstream, once with vLLM's default asynchronous scheduling and once with
`--vllm '{"async_scheduling": false}'`. Speculation must recover the difference.
"""

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from arms import Prompts, Setup, Worker
from peers import token_ids
from rich.console import Console
from rich.progress import track
from rich.table import Table

from serve_app.demo_data import BENCH_PROMPTS

PLAIN = "vllm"
WARM_UP_TOKENS = 24


def arms(arguments: argparse.Namespace) -> dict[str, Setup]:
    """Returns the arms' setups by name; the name's first word selects the engine."""
    longest = max(arguments.concurrency)
    own = {
        "method": "draft_model",
        "model": str(arguments.draft),
        "num_speculative_tokens": arguments.draft_tokens,
    }

    def setup(speculative: Mapping[str, object] | None, engine: Mapping[str, object]) -> Setup:
        return Setup(
            arguments.target,
            arguments.draft,
            arguments.dtype,
            arguments.threads,
            1024,
            longest,
            speculative,
            engine,
        )

    given = arguments.vllm
    ours = {key: value for key, value in given.items() if key != "async_scheduling"}
    return {
        PLAIN: setup(None, given),
        "vllm draft_model": setup(own, given),
        "slipstream-vllm": setup({"vllm": ours}, {}),
        "slipstream-own": setup({}, {}),
    }


def speeds(
    workers: Mapping[str, Worker], prompts: Prompts, at_once: int, arguments: argparse.Namespace
) -> Mapping[str, list[float]]:
    """Returns tokens per second of every batch, by arm."""
    names = list(workers)
    found: dict[str, list[float]] = {name: [] for name in names}
    chooser = random.Random(at_once)
    for number in track(range(arguments.rounds), f"{at_once} at once", console=Console(stderr=True)):
        batch = chooser.sample(list(prompts), at_once)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            run = workers[name].decode(batch, arguments.tokens)
            found[name].append(at_once * arguments.tokens / run.total_s)
    return found


def show(found: Mapping[int, Mapping[str, Sequence[float]]]) -> None:
    table = Table("arm", *[f"{at_once} at once" for at_once in found], title="Tokens/s, and ratio to plain vLLM")
    for name in next(iter(found.values())):
        cells = []
        for of in found.values():
            ratios = [mine / plain for mine, plain in zip(of[name], of[PLAIN], strict=True)]
            cells.append(f"{statistics.median(of[name]):.1f} ({statistics.median(ratios):.2f}x)")
        table.add_row(name, *cells)
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--draft-tokens", type=int, default=4, help="draft length of vLLM's own speculation")
    parser.add_argument("--vllm", type=json.loads, default={}, metavar="ENGINE_ARGUMENTS")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    parser.add_argument("--rounds", type=int, default=8, help="batches at each concurrency")
    parser.add_argument("--without", nargs="+", default=[], metavar="ARM")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    prompts = token_ids(arguments.target, BENCH_PROMPTS)
    found = {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, setup in arms(arguments).items():
            if name not in arguments.without:
                workers[name] = Worker(name, setup)
                stack.callback(workers[name].stop)
                workers[name].decode(prompts[: max(arguments.concurrency)], WARM_UP_TOKENS)
        for at_once in arguments.concurrency:
            found[at_once] = speeds(workers, prompts, at_once, arguments)
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
