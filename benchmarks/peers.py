"""Measures the speedup from speculation within other engines, on the prompts of `slipstream bench`.

    python benchmarks/peers.py TARGET --draft DRAFT [--threads 1] [--rounds 5] [--json FILE]
    python benchmarks/peers.py TARGET --vllm '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'

`--draft` adds transformers' assisted generation, at concurrency 1. `--vllm` adds vLLM with that speculative_config;
repeat it to add several. Each engine decodes greedily, in one process with its draft; arms alternate batch by batch.
The ratios are comparable with those of `pipeline.py`; the speeds are not, because they exclude a server.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from arms import Prompts, Setup, Worker
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from serve_app.demo_data import BENCH_PROMPTS
from tools.bench.experiment import read_prompts
from tools.bench.latencies import mean_ratio

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Ratio:
    """Ratio of an arm's speed to its engine's without speculation, with a bootstrap interval over batches."""

    arm: str
    base: str
    concurrency: int
    mean: float
    low: float
    high: float


def token_ids(target: Path, prompts_file: Path) -> Prompts:
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [[{"role": "user", "content": prompt.prompt}] for prompt in read_prompts(prompts_file)]
    return [
        tuple(tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=True)["input_ids"])
        for text in texts
    ]


def engines(arguments: argparse.Namespace) -> dict[str, dict[str, Setup]]:
    """Returns the arms of each engine; keys are the names of the arms without speculation."""
    setup = Setup(
        arguments.target, arguments.draft, arguments.dtype, arguments.threads, 1024, max(arguments.concurrency)
    )
    found = {}
    if arguments.draft is not None:
        found["generate"] = {"generate": setup, "assisted": setup}
    if arguments.vllm:
        found["vllm"] = {"vllm": setup}
        for config in arguments.vllm:
            found["vllm"][f"vllm {json.dumps(config)}"] = replace(setup, speculative=config)
    return found


def batches_of(prompts: Prompts, at_once: int, number: int) -> list[Prompts]:
    """Returns the batches of a round; rounds at concurrency 1 keep the order of prompts, others shuffle it."""
    order = list(prompts) if at_once == 1 else random.Random(number).sample(list(prompts), len(prompts))
    return [order[place : place + at_once] for place in range(0, len(order), at_once)]


def seconds(
    workers: Mapping[str, Worker], prompts: Prompts, at_once: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Returns seconds by arm, per batch. At concurrency 1, sums the dependent repeats of each prompt."""
    names = list(workers)
    rounds: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in track(range(arguments.rounds), f"{names[0]}, {at_once} at once", console=Console(stderr=True)):
        for times in rounds.values():
            times.append([])
        for place, batch in enumerate(batches_of(prompts, at_once, number)):
            first = (number + place) % len(names)
            for name in names[first:] + names[:first]:
                rounds[name][-1].append(workers[name].decode(batch, arguments.tokens).total_s)
    if at_once == 1:
        return {name: [sum(repeats) for repeats in zip(*times, strict=True)] for name, times in rounds.items()}
    return {name: [one for times in of for one in times] for name, of in rounds.items()}


def ratios(found: Mapping[str, Sequence[float]], base: str, at_once: int) -> list[Ratio]:
    return [
        Ratio(arm, base, at_once, *mean_ratio([b / a for a, b in zip(times, found[base], strict=True)]))
        for arm, times in found.items()
        if arm != base
    ]


def measured(base: str, arms: Mapping[str, Setup], prompts: Prompts, arguments: argparse.Namespace) -> list[Ratio]:
    """Measures all arms of an engine at every concurrency it supports."""
    found: list[Ratio] = []
    with ExitStack() as stack:
        workers = {}
        for name, setup in arms.items():
            workers[name] = Worker(name, setup)
            stack.callback(workers[name].stop)
            workers[name].decode(prompts[:1], WARM_UP_TOKENS)
        for at_once in (1,) if base == "generate" else arguments.concurrency:
            found += ratios(seconds(workers, prompts, at_once, arguments), base, at_once)
    return found


def show(found: Sequence[Ratio]) -> None:
    table = Table("arms", "at once", "95 % bootstrap interval", title="Speed with speculation over the same without")
    for ratio in found:
        interval = f"{ratio.mean:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"
        table.add_row(f"{ratio.arm} / {ratio.base}", str(ratio.concurrency), interval)
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path, help="draft model for assisted generation")
    parser.add_argument("--vllm", type=json.loads, action="append", default=[], metavar="SPECULATIVE_CONFIG")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=Path, default=BENCH_PROMPTS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if not arguments.draft and not arguments.vllm:
        parser.error("nothing to compare; pass --draft, --vllm or both")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    prompts = token_ids(arguments.target, arguments.prompts)
    found: list[Ratio] = []
    for base, arms in engines(arguments).items():
        found += measured(base, arms, prompts, arguments)
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(ratio) for ratio in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
