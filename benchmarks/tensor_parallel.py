"""Measures the cost of tensor parallelism on a CPU: forward passes of several ranks and of one rank, on the same cores.

    python benchmarks/tensor_parallel.py FOLDER [--ranks 3] [--dtype bfloat16] [--json FILE]

One process holds the whole model and computes with one thread, then with `--threads`; each rank has one thread. Apart
from forward passes, the benchmark measures draws of tokens from random logits: ranks gather the logits and rank 0
draws, or each rank draws from its shard of the vocabulary. All sides alternate for many rounds, so background load
affects all of them. A ratio is the median over the rounds: of draws from shards against those from gathered logits,
otherwise against the faster of the two single-process forward passes, because synchronized threads suffer most on a
busy machine.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from actors.compute.collectives import Group, Shard, SingleRank, TorchGroup, join
from actors.compute.kv_cache import InputRow
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import load
from actors.models.weights import LoadReport
from actors.sampling.draws import DrawsOnDevice, draw_tokens

CPU = torch.device("cpu")
PAGE_SIZE = 16
MAX_TOKENS = 16
WHOLE = ("one rank, one thread", "one rank, all threads")
SPLIT = ("ranks", "ranks over gloo")
FORWARD = "forward"
ALL_REDUCES = "all-reduces alone"
GATHERED_DRAWS = "draws from gathered logits"
SHARDED_DRAWS = "draws from shards"


@dataclass(frozen=True)
class Setting:
    """Settings shared by all processes."""

    folder: Path
    dtype: str
    ranks: int
    context: int  # cached tokens before the timed forward pass
    repeats: int  # forward passes per measurement


@dataclass(frozen=True)
class Order:
    """Next measurement: a forward pass of `tokens` tokens, or another part of a step."""

    side: str
    tokens: int
    part: str = FORWARD


class Side:
    """Whole model or one rank's shard, with its process group."""

    def __init__(self, setting: Setting, group: Group, threads: int = 1) -> None:
        self._threads = threads
        loaded = load(setting.folder, setting.dtype, CPU, group)
        self.load: LoadReport = loaded.report
        config = loaded.model.config
        self._width = config.hidden_size
        self._layers = config.num_hidden_layers
        self._shard = Shard(group, config.vocab_size)
        dtype = getattr(torch, setting.dtype)
        self._logits = torch.randn(MAX_TOKENS, self._shard.own_columns).to(dtype)
        self._parts = {
            FORWARD: self._forward,
            ALL_REDUCES: self._all_reduces,
            GATHERED_DRAWS: self._draws_from_gathered_logits,
            SHARDED_DRAWS: self._draws_from_shards,
        }
        self._group = group
        self._setting = setting
        self._pages = tuple(range(-(-(setting.context + MAX_TOKENS) // PAGE_SIZE)))
        self._runner = ModelRunner(loaded.model, len(self._pages), PAGE_SIZE, ranks=group.size)
        self._runner.forward([InputRow((1,) * setting.context, 0, 1, self._pages)])

    def measure(self, order: Order) -> float:
        """Returns median seconds over the repeats."""
        torch.set_num_threads(self._threads)
        work = partial(self._parts[order.part], order.tokens)
        work()
        return statistics.median(seconds(work) for _ in range(self._setting.repeats))

    def _forward(self, tokens: int) -> None:
        self._runner.forward([InputRow((1,) * tokens, self._setting.context, tokens, self._pages)])

    def _all_reduces(self, tokens: int) -> None:
        tensor = torch.zeros(tokens, self._width, dtype=getattr(torch, self._setting.dtype))
        for _ in range(2 * self._layers + 1):
            self._group.all_reduce(tensor)

    def _draws_from_gathered_logits(self, tokens: int) -> None:
        logits = self._shard.gather(self._logits[:tokens])
        if self._group.rank == 0:
            draw_tokens(logits, sampled(tokens))

    def _draws_from_shards(self, tokens: int) -> None:
        draw_tokens(self._logits[:tokens], sampled(tokens), self._shard)


def sampled(positions: int) -> DrawsOnDevice:
    """Returns draws at temperature 1 for all positions."""
    every = torch.arange(positions)
    return DrawsOnDevice(every, every, torch.ones(positions, dtype=torch.float64))


def seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@torch.inference_mode()
def whole(setting: Setting, threads: int, pipe: Connection) -> None:
    """Runs the process with the whole model."""
    serve_commands(
        pipe, {side: Side(setting, SingleRank(), count) for side, count in zip(WHOLE, (1, threads), strict=True)}
    )


@torch.inference_mode()
def a_rank(rank: int, setting: Setting, meeting: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=setting.ranks)
    serve_commands(
        pipe, {side: Side(setting, group) for side, group in zip(SPLIT, (join(CPU), TorchGroup()), strict=True)}
    )


def serve_commands(pipe: Connection, sides: dict[str, Side]) -> None:
    pipe.send([asdict(side.load) for side in sides.values()])
    while (order := pipe.recv()) is not None:
        pipe.send(sides[order.side].measure(order))


def ask(pipes: list[Connection], order: Order) -> float:
    """Returns the seconds of the slowest process."""
    for pipe in pipes:
        pipe.send(order)
    return max(pipe.recv() for pipe in pipes)


def compare(setting: Setting, threads: int, rounds: int) -> dict[str, object]:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(setting.ranks + 1)]
        calls = [(whole, (setting, threads, ends[0][1]))]
        calls += [(a_rank, (rank, setting, f"{folder}/meeting", ends[rank + 1][1])) for rank in range(setting.ranks)]
        processes = [context.Process(target=target, args=args, daemon=True) for target, args in calls]
        for process, (_, its) in zip(processes, ends, strict=True):
            process.start()
            its.close()  # so that a dead process closes the pipe
        pipes = [mine for mine, _ in ends]
        loads = [pipe.recv()[0] for pipe in pipes]
        by_side = dict.fromkeys(WHOLE, pipes[:1]) | dict.fromkeys(SPLIT, pipes[1:])
        sizes = (1, MAX_TOKENS)
        orders = [Order(side, tokens) for tokens in sizes for side in by_side]
        parts = (ALL_REDUCES, GATHERED_DRAWS, SHARDED_DRAWS)
        orders += [Order(side, tokens, part) for part in parts for tokens in sizes for side in SPLIT]
        found: dict[Order, list[float]] = {order: [] for order in orders}
        for _ in track(range(rounds), "Measuring", console=Console(stderr=True)):
            for order in orders:
                found[order].append(ask(by_side[order.side], order))
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join()
    return {"setting": {**asdict(setting), "folder": setting.folder.name}, "load": loads, "times": rows(found)}


def rows(found: dict[Order, list[float]]) -> list[dict[str, object]]:
    """Returns median times in milliseconds and median ratios, of draws from shards to those from gathered logits."""
    shown = []
    for order, times in found.items():
        if order.part == SHARDED_DRAWS:
            bases = iter(found[replace(order, part=GATHERED_DRAWS)])
        else:
            bases = map(min, *(found[Order(side, order.tokens)] for side in WHOLE))
        ratio = statistics.median(mine / base for mine, base in zip(times, bases, strict=True))
        shown.append({**asdict(order), "ms": round(1e3 * statistics.median(times), 2), "ratio": round(ratio, 2)})
    return shown


def table(result: dict[str, object]) -> Table:
    shown = Table("side", "tokens", "what", "ms", "ratio")
    for row in result["times"]:  # type: ignore[attr-defined]
        shown.add_row(row["side"], str(row["tokens"]), row["part"], str(row["ms"]), str(row["ratio"]))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="model folder")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the single process")
    parser.add_argument("--context", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    setting = Setting(arguments.folder, arguments.dtype, arguments.ranks, arguments.context, arguments.repeats)
    result = compare(setting, arguments.threads, arguments.rounds)
    Console().print(table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
