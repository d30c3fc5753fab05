"""Compares the link between a coordinator and its rank, a Unix socket, with shared memory.

    python benchmarks/rank_link.py [--sizes 200,3000,12000,48000] [--calls 5000] [--rounds 5] [--json OUT]

Each call sends a message to another process, which answers with a quarter of its size. The default sizes are those of
steps with 1, 16, 64 and 256 sessions. With shared memory, an eventfd announces each message; waits on both sides are
those of a server: the rank blocks, and the coordinator runs an event loop. The two links alternate within each round.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from abc import ABC, abstractmethod
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from rich.console import Console
from rich.table import Table

from actors.engine.step_socket import StepCaller, StepListener

SPACE = 1 << 20  # bytes per direction


def answer(message: bytes) -> bytes:
    return message[: len(message) // 4]


class Link(ABC):
    """A connection to a process that answers messages."""

    @abstractmethod
    async def call(self, message: bytes) -> bytes:
        """Returns the answer to a message."""

    @abstractmethod
    def close(self) -> None:
        """Ends the other process."""


class SocketLink(Link):
    """The link in use."""

    def __init__(self, caller: StepCaller, process: multiprocessing.process.BaseProcess) -> None:
        self._caller = caller
        self._process = process

    @classmethod
    async def start(cls) -> "SocketLink":
        listener = StepListener()
        process = multiprocessing.get_context("fork").Process(target=listener.serve, args=(answer,), daemon=True)
        process.start()
        return cls(await StepCaller.dial(listener.path), process)

    async def call(self, message: bytes) -> bytes:
        return await self._caller.call(message)

    def close(self) -> None:
        self._caller.close()
        self._process.terminate()
        self._process.join()


class MemoryLink(Link):
    """Shared memory with one eventfd per direction; a message's size is the value of its eventfd."""

    def __init__(self) -> None:
        self._requests, self._answers = SharedMemory(create=True, size=SPACE), SharedMemory(create=True, size=SPACE)
        self._requested, self._answered = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
        self._process = multiprocessing.get_context("fork").Process(target=self._serve, daemon=True)
        self._process.start()
        self._future: asyncio.Future[bytes] | None = None
        asyncio.get_running_loop().add_reader(self._answered, self._on_answer)

    async def call(self, message: bytes) -> bytes:
        self._future = asyncio.get_running_loop().create_future()
        self._requests.buf[: len(message)] = message
        os.eventfd_write(self._requested, len(message))
        return await self._future

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._answered)
        self._process.terminate()
        self._process.join()
        for memory in (self._requests, self._answers):
            memory.close()
            memory.unlink()

    def _serve(self) -> None:
        while True:
            size = os.eventfd_read(self._requested)
            body = answer(bytes(self._requests.buf[:size]))
            self._answers.buf[: len(body)] = body
            os.eventfd_write(self._answered, len(body))

    def _on_answer(self) -> None:
        size = os.eventfd_read(self._answered)
        assert self._future is not None, "only an answer sets the eventfd"
        self._future.set_result(bytes(self._answers.buf[:size]))


async def microseconds(link: Link, size: int, calls: int) -> float:
    """Returns the median duration of a call, in microseconds."""
    message = bytes(size)
    durations = []
    for _ in range(calls):
        begin = time.perf_counter()
        await link.call(message)
        durations.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(durations)


async def measure(sizes: list[int], calls: int, rounds: int) -> list[dict[str, float]]:
    links: dict[str, Link] = {"socket": await SocketLink.start(), "memory": MemoryLink()}
    results = []
    for size in sizes:
        times: dict[str, list[float]] = {name: [] for name in links}
        for _ in range(rounds):
            for name, link in links.items():
                times[name].append(await microseconds(link, size, calls))
        results.append({"bytes": size} | {f"{name}_us": statistics.median(found) for name, found in times.items()})
    for link in links.values():
        link.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="200,3000,12000,48000", help="message sizes, in bytes")
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(measure([*map(int, arguments.sizes.split(","))], arguments.calls, arguments.rounds))
    table = Table("bytes", "socket, us", "shared memory, us")
    for result in results:
        table.add_row(str(result["bytes"]), f"{result['socket_us']:.1f}", f"{result['memory_us']:.1f}")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
