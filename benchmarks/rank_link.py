"""Measures the link between a coordinator and its rank: a Unix socket in an event loop against shared memory.

    python benchmarks/rank_link.py --bytes 8192 --json rank_link.json

A second process answers each request at once with as many bytes. `socket` is the product's link (`StepCaller` and
`StepListener`). `shared memory` copies the bytes through a mapped file and wakes the other side through a socket pair,
as a link must do that leaves the core to others while it waits. `spinning` polls the mapped file instead and occupies
both cores. Reports medians and 99th percentiles of the round trip, in microseconds.
"""

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.engine.step_socket import StepCaller, StepListener

ROUNDS = 3000
WARM_UP = 300
ANSWER_AT = 1 << 20  # offset of the answer in the mapped memory
MEMORY_BYTES = 2 << 20


def figures(seconds: list[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile in microseconds."""
    cuts = statistics.quantiles(seconds[WARM_UP:], n=100)
    return {"p50": 1e6 * cuts[49], "p99": 1e6 * cuts[98]}


def serve_socket(ready: Connection) -> None:
    listener = StepListener()
    ready.send(listener.path)
    listener.serve(lambda message: message)


async def over_socket(size: int) -> list[float]:
    ours, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("spawn").Process(target=serve_socket, args=(theirs,), daemon=True)
    rank.start()
    caller = await StepCaller.dial(ours.recv())
    message = bytes(size)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await caller.call(message)
        seconds.append(time.perf_counter() - began)
    caller.close()
    rank.join()
    return seconds


def serve_memory(memory: mmap.mmap, wake: socket.socket, size: int) -> None:
    while wake.recv(1):
        memory[ANSWER_AT : ANSWER_AT + size] = memory[:size]
        wake.send(b"a")


def serve_spinning(memory: mmap.mmap, wake: socket.socket, size: int) -> None:
    for turn in range(1, ROUNDS + 1):
        while memory[size] != turn % 251:
            pass
        memory[ANSWER_AT : ANSWER_AT + size] = memory[:size]
        memory[ANSWER_AT + size] = turn % 251


def over_memory(size: int, serve: Callable[[mmap.mmap, socket.socket, int], None]) -> list[float]:
    memory = mmap.mmap(-1, MEMORY_BYTES)
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        ours.close()
        serve(memory, theirs, size)
        os._exit(0)
    theirs.close()
    message = bytes(size)
    seconds = []
    for turn in range(1, ROUNDS + 1):
        began = time.perf_counter()
        memory[:size] = message
        if serve is serve_spinning:
            memory[size] = turn % 251
            while memory[ANSWER_AT + size] != turn % 251:
                pass
        else:
            ours.send(b"a")
            ours.recv(1)
        assert len(memory[ANSWER_AT : ANSWER_AT + size]) == size
        seconds.append(time.perf_counter() - began)
    ours.close()
    os.waitpid(child, 0)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the link between a coordinator and its rank.")
    parser.add_argument("--bytes", type=int, default=8192, help="size of requests and answers")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    assert threading.active_count() == 1, "forking needs a single thread"
    results = {
        "shared memory": figures(over_memory(arguments.bytes, serve_memory)),
        "spinning": figures(over_memory(arguments.bytes, serve_spinning)),
        "socket": figures(asyncio.run(over_socket(arguments.bytes))),
    }
    table = Table("link", "p50", "p99", title=f"round trip of {arguments.bytes} bytes, us")
    for name, result in results.items():
        table.add_row(name, *[f"{value:.0f}" for value in result.values()])
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
