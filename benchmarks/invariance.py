"""Measures the cost of `model.numerics: invariant` on a CPU: step times of both numerics, interleaved.

    python benchmarks/invariance.py [--folder FOLDER] [--dtype float32] [--tokens 1] [--rounds 5] [--json FILE]

Loads the model once with each of the numerics and compares forwards of the same rows, `--tokens` per request. Requests
have contexts of unlike lengths, which invariant attention must pad. Reports medians of a step in milliseconds, and the
ratio with its 95 % interval over the rounds.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from actors.attention.invariant import invariant_attention
from actors.attention.select_backend import attention_shape
from actors.compute.kv_cache import InputRow
from actors.compute.linear import InvariantProducts, projection
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import load_model
from actors.models.decoder import decoder_for
from serve_app.cli.demo import demo_config, prepare_target
from tools.bench.latencies import mean_ratio

REQUESTS = (1, 4, 16)
CONTEXTS = (200, 2000)
SPREAD = 64  # contexts of a step are drawn within this many tokens from the nominal length
PAGE = 16
CHUNK = 256  # prompt tokens per forward
STEPS = 12  # per round and cell, for each of the numerics


@dataclass(frozen=True)
class Cell:
    """Step times at one number of requests and context length."""

    requests: int
    context: int
    fast_ms: float
    invariant_ms: float
    ratio: float
    low: float
    high: float


def load_runner(folder: Path, dtype: str, *, is_invariant: bool) -> ModelRunner:
    model = load_model(folder, dtype, torch.device("cpu")).eval()
    context = CONTEXTS[-1] + SPREAD + CHUNK
    attention = invariant_attention(attention_shape(model, PAGE)) if is_invariant else None
    decoder = decoder_for(model, InvariantProducts() if is_invariant else projection, context)
    return ModelRunner(model, REQUESTS[-1] * -(-context // PAGE), PAGE, attention, decoder, context=context)


def rows_of(runners: tuple[ModelRunner, ...], requests: int, context: int, tokens: int) -> list[InputRow]:
    """Fills the caches of all runners; returns the rows of the next step."""
    drawn = random.Random(0)
    pages = -(-(context + SPREAD + tokens) // PAGE)
    rows = []
    for request in range(requests):
        length = context + drawn.randrange(SPREAD)
        text = tuple(drawn.randrange(100, runners[0].vocabulary) for _ in range(length + tokens))
        table = tuple(range(request * pages, (request + 1) * pages))
        for start in range(0, length, CHUNK):
            chunk = text[start : min(start + CHUNK, length)]
            for runner in runners:
                runner.forward([InputRow(chunk, start, 1, table)])
        rows.append(InputRow(text[length:], length, tokens, table))
    return rows


def step_times(runners: tuple[ModelRunner, ...], rows: list[InputRow]) -> list[float]:
    """Returns each runner's median milliseconds of a step; runners alternate."""
    times: list[list[float]] = [[] for _ in runners]
    for _ in range(STEPS):
        for runner, found in zip(runners, times, strict=True):
            began = time.perf_counter()
            runner.forward(rows)
            found.append(1000 * (time.perf_counter() - began))
    return [statistics.median(found) for found in times]


def measure(runners: tuple[ModelRunner, ...], requests: int, context: int, tokens: int, rounds: int) -> Cell:
    rows = rows_of(runners, requests, context, tokens)
    label = f"{requests} requests, {context} tokens"
    found = [step_times(runners, rows) for _ in track(range(rounds), label, console=Console(stderr=True))]
    fast, invariant = (statistics.median(times) for times in zip(*found, strict=True))
    return Cell(requests, context, fast, invariant, *mean_ratio([slow / quick for quick, slow in found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="model; default: the demo's target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=1, help="tokens per request and step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the measurements here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = arguments.folder
    if folder is None:
        folder = Path(demo_config().model.target).expanduser()
        prepare_target(folder, Console(stderr=True))
    with torch.inference_mode():
        runners = tuple(load_runner(folder, arguments.dtype, is_invariant=invariant) for invariant in (False, True))
        cells = [
            measure(runners, requests, context, arguments.tokens, arguments.rounds)
            for context in CONTEXTS
            for requests in REQUESTS
        ]
    table = Table("requests", "context", "fast, ms", "invariant, ms", "ratio (95 % interval)")
    for cell in cells:
        ratio = f"{cell.ratio:.3f} ({cell.low:.3f} to {cell.high:.3f})"
        table.add_row(f"{cell.requests}", f"{cell.context}", f"{cell.fast_ms:.2f}", f"{cell.invariant_ms:.2f}", ratio)
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2))


if __name__ == "__main__":
    main()
