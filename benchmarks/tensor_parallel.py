"""Measures the cost of tensor parallelism on a CPU: forward passes of several ranks and of one rank, on the same cores.

    python benchmarks/tensor_parallel.py FOLDER [--ranks 3] [--dtype bfloat16] [--json FILE]

One process holds the whole model and computes with one thread, then with `--threads`; each rank has one thread. All
sides alternate for many rounds, so background load affects all of them. A ratio is the median over the rounds against
the faster of the two single-process times, because synchronized threads suffer most on a busy machine.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from actors.compute.collectives import Group, SingleRank, TorchGroup, join
from actors.compute.kv_cache import InputRow
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import load
from actors.models.weights import LoadReport

CPU = torch.device("cpu")
PAGE_SIZE = 16
MAX_TOKENS = 8
WHOLE = ("one rank, one thread", "one rank, all threads")
SPLIT = ("ranks", "ranks over gloo")


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
    """Next measurement: a forward pass of `tokens` tokens or, if `bare`, only its all-reduces."""

    side: str
    tokens: int
    bare: bool = False


class Side:
    """Whole model or one rank's shard, with its process group."""

    def __init__(self, setting: Setting, group: Group, threads: int = 1) -> None:
        self._threads = threads
        loaded = load(setting.folder, setting.dtype, CPU, group)
        self.load: LoadReport = loaded.report
        config = loaded.model.config
        self._width = config.hidden_size
        self._layers = config.num_hidden_layers
        self._group = group
        self._setting = setting
        self._pages = tuple(range(-(-(setting.context + MAX_TOKENS) // PAGE_SIZE)))
        self._runner = ModelRunner(loaded.model, len(self._pages), PAGE_SIZE, ranks=group.size)
        self._runner.forward([InputRow((1,) * setting.context, 0, 1, self._pages)])

    def measure(self, order: Order) -> float:
        """Returns median seconds over the repeats."""
        torch.set_num_threads(self._threads)
        work = self._all_reduces if order.bare else self._forward
        work(order.tokens)
        return statistics.median(seconds(lambda: work(order.tokens)) for _ in range(self._setting.repeats))

    def _forward(self, tokens: int) -> None:
        self._runner.forward([InputRow((1,) * tokens, self._setting.context, tokens, self._pages)])

    def _all_reduces(self, tokens: int) -> None:
        tensor = torch.zeros(tokens, self._width, dtype=getattr(torch, self._setting.dtype))
        for _ in range(2 * self._layers + 1):
            self._group.all_reduce(tensor)


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
        orders = [Order(side, tokens) for tokens in (1, 8) for side in by_side]
        orders += [Order(side, tokens, bare=True) for tokens in (1, 8) for side in SPLIT]
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
    """Returns median times in milliseconds and median ratios."""
    shown = []
    for order, times in found.items():
        bases = map(min, *(found[Order(side, order.tokens)] for side in WHOLE))
        ratio = statistics.median(mine / base for mine, base in zip(times, bases, strict=True))
        shown.append({**asdict(order), "ms": round(1e3 * statistics.median(times), 2), "ratio": round(ratio, 2)})
    return shown


def table(result: dict[str, object]) -> Table:
    shown = Table("side", "tokens", "what", "ms", "ratio to one rank")
    for row in result["times"]:  # type: ignore[attr-defined]
        what = "all-reduces alone" if row["bare"] else "forward"
        shown.add_row(row["side"], str(row["tokens"]), what, str(row["ms"]), str(row["ratio"]))
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
