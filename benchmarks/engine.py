"""Compares the engine with other engines: non-speculative throughput, time to first token, and step time.

    python benchmarks/engine.py FOLDER [--draft FOLDER] [--dtype float32] [--threads 2] [--json FILE] [--plot FILE]

Each arm runs in its own process, suspended between its requests. Arms alternate prompt by prompt, so background load
affects all of them. Reports medians and ratios over the rounds.
"""

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arms import EngineArm, Prompts, Run, Setup, Worker
from rich.console import Console
from rich.progress import track
from rich.table import Table

PROMPT_TOKENS = 24
LONG_PROMPT = 1000
STEPS = ((1, 1, 60), (1, 8, 60), (1, 40, 60), (4, 1, 60), (8, 1, 60), (8, 5, 100), (32, 1, 60), (1, 1, 1000))


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of each arm at one concurrency, by round."""

    concurrency: int
    tokens_per_s: dict[str, list[float]]

    def ratio(self, arm: str, base: str) -> float:
        pairs = zip(self.tokens_per_s[arm], self.tokens_per_s[base], strict=True)
        return statistics.median(ours / reference for ours, reference in pairs)


def random_prompts(count: int, length: int, seed: int) -> Prompts:
    drawn = random.Random(seed)
    return [tuple(drawn.randrange(100, 20_000) for _ in range(length)) for _ in range(count)]


def throughput(workers: Sequence[Worker], concurrency: int, new_tokens: int, rounds: int) -> Throughput:
    """Alternates the arms; assisted generation runs only at concurrency 1."""
    found: dict[str, list[float]] = {w.name: [] for w in workers if concurrency == 1 or w.name != "assisted"}
    for number in track(range(rounds), f"{concurrency} at once", console=Console(stderr=True)):
        prompts = random_prompts(concurrency, PROMPT_TOKENS, number)
        for worker in workers:
            if worker.name in found:
                run = worker.decode(prompts, new_tokens)
                found[worker.name].append(concurrency * new_tokens / run.total_s)
    return Throughput(concurrency, found)


def first_token(workers: Sequence[Worker], rounds: int) -> dict[str, float]:
    """Returns each arm's median time to first token for a long prompt, in seconds."""
    runs: dict[str, list[Run]] = {worker.name: [] for worker in workers}
    for number in range(rounds):
        for worker in workers:
            runs[worker.name].append(worker.decode(random_prompts(1, LONG_PROMPT, number), 2))
    return {name: statistics.median(run.first_s for run in found) for name, found in runs.items()}


# ---------------------------------------------------------------- one step


def median_ms(*sides: Callable[[], object], rounds: int = 15) -> list[float]:
    """Returns each side's median milliseconds over alternating runs."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, times in zip(sides, found, strict=True):
            began = time.perf_counter()
            side()
            times.append(1000 * (time.perf_counter() - began))
    return [statistics.median(times) for times in found]


def step_times(setup: Setup) -> list[dict[str, float]]:
    """Times our forward pass, transformers' forward pass with a DynamicCache, and the linear layers alone, in turn."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from actors.compute.kv_cache import InputRow

    model = AutoModelForCausalLM.from_pretrained(setup.folder, dtype=getattr(torch, setup.dtype)).eval()
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
    forward = EngineArm(setup).forward
    per_row = -(-(max(context for *_, context in STEPS) + 64) // 16)
    rows_of: list[dict[str, float]] = []
    with torch.inference_mode():
        for rows, tokens, context in STEPS:
            prompts = random_prompts(rows, context + tokens, 0)
            tables = [tuple(range(per_row * row, per_row * (row + 1))) for row in range(rows)]
            for prompt, pages in zip(prompts, tables, strict=True):
                forward([InputRow(prompt[:context], 0, 1, pages)])
            ours = [InputRow(p[context:], context, tokens, t) for p, t in zip(prompts, tables, strict=True)]
            cache = DynamicCache(config=model.config)
            model(torch.tensor([prompt[:context] for prompt in prompts]), past_key_values=cache)
            fed = torch.tensor([prompt[context:] for prompt in prompts])
            inputs = [torch.randn(rows * tokens, linear.in_features, dtype=model.dtype) for linear in linears]

            def reference(fed: Any = fed, cache: Any = cache, tokens: int = tokens) -> None:
                model(fed, past_key_values=cache)
                cache.crop(-tokens)

            def bare(inputs: Any = inputs) -> None:
                for linear, x in zip(linears, inputs, strict=True):
                    linear(x)

            engine, plain, products = median_ms(lambda ours=ours: forward(ours), reference, bare)
            rows_of.append(
                {
                    "rows": rows,
                    "tokens_per_row": tokens,
                    "context": context,
                    "engine_ms": engine,
                    "transformers_ms": plain,
                    "linears_ms": products,
                }
            )
    return rows_of


# ---------------------------------------------------------------- report


def show(console: Console, found: list[Throughput], first: dict[str, float], steps: list[dict[str, float]]) -> None:
    table = Table("at once", *found[0].tokens_per_s, title="tokens/s, and the engine's ratio to each")
    for line in found:
        medians = {arm: statistics.median(values) for arm, values in line.tokens_per_s.items()}
        cells = [
            f"{medians[arm]:.1f}" + ("" if arm == "engine" else f"  ({line.ratio('engine', arm):.2f}x)")
            if arm in medians
            else "-"
            for arm in found[0].tokens_per_s
        ]
        table.add_row(str(line.concurrency), *cells)
    console.print(table)
    alone = statistics.median(found[0].tokens_per_s["engine"])
    for line in found[1:]:
        many = statistics.median(line.tokens_per_s["engine"])
        console.print(f"{line.concurrency} at once: {many / alone:.1f} times our own single stream")
    console.print({f"seconds to the first token after {LONG_PROMPT}": {k: round(v, 2) for k, v in first.items()}})
    table = Table("rows", "tokens each", "context", "engine, ms", "transformers, ms", "ratio", "bare linears, ms")
    for step in steps:
        ratio = step["transformers_ms"] / step["engine_ms"]
        times = (step["engine_ms"], step["transformers_ms"], ratio, step["linears_ms"])
        shape = (step["rows"], step["tokens_per_row"], step["context"])
        table.add_row(*map(str, shape), *(f"{value:.2f}" for value in times))
    console.print(table)


def plot(path: Path, found: list[Throughput]) -> None:
    """Plots tokens per second over concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for arm in found[0].tokens_per_s:
        points = [(f.concurrency, statistics.median(f.tokens_per_s[arm])) for f in found if arm in f.tokens_per_s]
        axes.plot(*zip(*points, strict=True), marker="o", label=arm)
    axes.set(xlabel="requests at once", ylabel="tokens/s", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="target model")
    parser.add_argument("--draft", type=Path, help="draft model; adds assisted generation")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 12, 32])
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-vllm", action="store_true", help="skip vLLM even if installed")
    parser.add_argument("--without-steps", action="store_true", help="skip step times")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--plot", type=Path, help="write a plot here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    setup = Setup(
        arguments.folder,
        arguments.draft,
        arguments.dtype,
        arguments.threads,
        context=2048,
        sessions=max(*arguments.concurrency, 32),
    )
    names = ["engine", "generate"]
    names += ["assisted"] if arguments.draft else []
    names += ["vllm"] if importlib.util.find_spec("vllm") and not arguments.without_vllm else []
    with ExitStack() as stack:
        workers = []
        for name in names:
            workers.append(Worker(name, setup))
            stack.callback(workers[-1].stop)
            workers[-1].decode(random_prompts(2, PROMPT_TOKENS, -1), 8)  # warms up
        found = [throughput(workers, n, arguments.tokens, arguments.rounds) for n in arguments.concurrency]
        first = first_token(workers, 3)
    import torch

    torch.set_num_threads(arguments.threads)
    steps = [] if arguments.without_steps else step_times(setup)
    show(Console(), found, first, steps)
    if arguments.json:
        measured = {"throughput": [asdict(line) for line in found], "first_token_s": first, "steps": steps}
        arguments.json.write_text(json.dumps(measured, indent=2))
    if arguments.plot:
        plot(arguments.plot, found)


if __name__ == "__main__":
    main()
