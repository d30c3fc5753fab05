"""Compares links between a target's processes: coordinator to leading rank, and leading rank to its followers.

    python benchmarks/rank_link.py [--sessions 1,16,64,256] [--calls 1000] [--rounds 5] [--json OUT]

- call: the coordinator sends a step plan on an event loop, and the rank answers with a quarter of its size. `memory` is
  the link in use, `socket` sends whole messages over the socket, and `thread` calls a thread of the same process, where
  the interpreter lock is free; it shows what one process without that lock would gain.
- forward: from the leader's encoding to the follower's decoding. `memory` is the link in use, `socket` as before, and
  `gloo` broadcasts tensors of 16 KiB, as many as needed.
- spinning: as `memory`, but the rank polls for 100 us before it blocks.

Each side of a link has its own core. `--pause-us` precedes each message, as the time between two steps does. The links
alternate within each round. `idle` is the CPU time of a receiver per second without messages. On a busy machine, run it
with `chrt -f 10`, so that other processes do not delay it.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import queue
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import uvloop
from rich.console import Console
from rich.table import Table

from actors.compute.kv_cache import InputRow
from actors.engine.forward_codec import decode_forward, encode_forward
from actors.engine.shared_memory import NOTICE, MessageMemory
from actors.engine.step_link import FollowersLink, LeaderLink, Listener, StepCaller, StepListener

CORES = (0, 1)  # of sender and receiver
BYTES_PER_SESSION = 200  # of a step plan
TOKENS, PAGES = 5, 36  # of a row, as in a text of 560 tokens
CHUNK = 4096  # integers per broadcast
SPIN_S = 100e-6
IDLE_S = 1.0
HEADER = struct.Struct("!I")

Call = Callable[[bytes], Awaitable[bytes]]
Send = Callable[[list[InputRow]], None]


def pause(seconds: float) -> None:
    """Blocks the event loop, whose timers are coarser."""
    time.sleep(seconds)


def answer(message: bytes) -> bytes:
    return message[: len(message) // 4]


class Receiver:
    """Process on the second core."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(work, *args), daemon=True)
        self._process.start()

    @staticmethod
    def _run(work: Callable[..., None], *args: Any) -> None:
        os.sched_setaffinity(0, {CORES[1]})
        work(*args)

    def idle_ms(self) -> float:
        """Returns the CPU time during one idle second, in milliseconds."""
        before = self._cpu_s()
        time.sleep(IDLE_S)
        return 1e3 * (self._cpu_s() - before) / IDLE_S

    def _cpu_s(self) -> float:
        ran_ns = 0  # the tick-based counters of /proc/PID/stat are too coarse
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            ran_ns += int((task / "schedstat").read_text().split()[0])
        return 1e-9 * ran_ns

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    return connection.recv(size, socket.MSG_WAITALL)


# ---------------------------------------------------------------- coordinator to leading rank


async def memory_call() -> tuple[Call, Receiver]:
    listener = StepListener()
    receiver = Receiver(listener.serve, answer)
    caller = await StepCaller.dial(listener.path)
    return caller.call, receiver


class StreamCaller(asyncio.Protocol):
    """Sends whole messages over a socket."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.received = bytearray()
        self.result: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if len(self.received) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self.received)[0]
            if len(self.received) >= end:
                body = bytes(self.received[HEADER.size : end])
                self.received.clear()
                assert self.result is not None, "nobody has asked"
                self.result.set_result(body)

    def call(self, message: bytes) -> asyncio.Future[bytes]:
        self.result = asyncio.get_running_loop().create_future()
        self.transport.write(HEADER.pack(len(message)) + message)
        return self.result


async def socket_call() -> tuple[Call, Receiver]:
    ours, theirs = socket.socketpair()

    def serve() -> None:
        ours.close()
        while header := receive_exactly(theirs, HEADER.size):
            body = answer(receive_exactly(theirs, *HEADER.unpack(header)))
            theirs.sendall(HEADER.pack(len(body)) + body)

    receiver = Receiver(serve)
    theirs.close()
    _, caller = await asyncio.get_running_loop().create_unix_connection(StreamCaller, sock=ours)
    return caller.call, receiver


def thread_call() -> Call:
    loop = asyncio.get_running_loop()
    calls: queue.SimpleQueue[tuple[bytes, asyncio.Future[bytes]]] = queue.SimpleQueue()

    def serve() -> None:
        os.sched_setaffinity(0, {CORES[1]})
        while True:
            message, result = calls.get()
            loop.call_soon_threadsafe(result.set_result, answer(message))

    threading.Thread(target=serve, daemon=True).start()

    def call(message: bytes) -> asyncio.Future[bytes]:
        result: asyncio.Future[bytes] = loop.create_future()
        calls.put((message, result))
        return result

    return call


async def spinning_call() -> tuple[Call, Receiver]:
    listener = Listener()

    def serve() -> None:
        (caller,) = listener.accept(1)
        _, descriptors, _, _ = socket.recv_fds(caller, 1, 2)
        requests, answers = map(MessageMemory, descriptors)
        while notice := spinning_receive(caller):
            caller.sendall(answers.write(answer(requests.read(notice))))

    receiver = Receiver(serve)
    caller = await StepCaller.dial(listener.path)
    return caller.call, receiver


def spinning_receive(connection: socket.socket) -> bytes:
    end = time.perf_counter() + SPIN_S
    while time.perf_counter() < end:
        try:
            return connection.recv(NOTICE.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
    return receive_exactly(connection, NOTICE.size)


async def call_us(call: Call, size: int, calls: int, pause_s: float) -> float:
    message = bytes(size)
    durations = []
    for _ in range(calls):
        pause(pause_s)
        began = time.perf_counter()
        await call(message)
        durations.append(time.perf_counter() - began)
    return 1e6 * statistics.median(durations)


# ---------------------------------------------------------------- leading rank to a follower


# Each follower stores the time after decoding in `arrivals`, a shared array of one float.


def memory_forward(arrivals: Any) -> tuple[Send, Receiver]:
    listener = Listener()

    def follow() -> None:
        link = LeaderLink(listener.path)
        while True:
            decode_forward(link.receive())
            arrivals[0] = time.perf_counter()

    receiver = Receiver(follow)
    link = FollowersLink(listener.accept(1))
    return lambda rows: link.send(encode_forward(rows, ())), receiver


def socket_forward(arrivals: Any) -> tuple[Send, Receiver]:
    ours, theirs = socket.socketpair()

    def follow() -> None:
        while True:
            header = receive_exactly(theirs, HEADER.size)
            decode_forward(receive_exactly(theirs, *HEADER.unpack(header)))
            arrivals[0] = time.perf_counter()

    def send(rows: list[InputRow]) -> None:
        message = encode_forward(rows, ())
        ours.sendall(HEADER.pack(len(message)) + message)

    return send, Receiver(follow)


def gloo_forward(arrivals: Any, folder: str) -> tuple[Send, Receiver]:
    def join(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

    def follow() -> None:
        join(1)
        while True:
            parts = [torch.zeros(CHUNK, dtype=torch.int32)]
            dist.broadcast(parts[0], src=0)
            size = int(parts[0][0])
            if size > CHUNK:
                parts.append(torch.zeros(size - CHUNK, dtype=torch.int32))
                dist.broadcast(parts[1], src=0)
            numbers = torch.cat(parts).tolist()
            decode_forward(struct.pack(f"{size - 1}i", *numbers[1:size]))
            arrivals[0] = time.perf_counter()

    receiver = Receiver(follow)
    join(0)

    def send(rows: list[InputRow]) -> None:
        message = encode_forward(rows, ())
        numbers = torch.frombuffer(bytearray(message), dtype=torch.int32)
        padded = torch.zeros(max(CHUNK, len(numbers) + 1), dtype=torch.int32)
        padded[0] = len(numbers) + 1
        padded[1 : len(numbers) + 1] = numbers
        dist.broadcast(padded[:CHUNK], src=0)
        if len(padded) > CHUNK:
            dist.broadcast(padded[CHUNK:], src=0)

    return send, receiver


def forward_us(send: Send, arrivals: Any, rows: list[InputRow], calls: int, pause_s: float) -> float:
    durations = []
    for _ in range(calls):
        pause(pause_s)
        began = time.perf_counter()
        send(rows)
        while arrivals[0] < began:
            time.sleep(100e-6)
        durations.append(arrivals[0] - began)
    return 1e6 * statistics.median(durations)


def rows_of(sessions: int) -> list[InputRow]:
    return [InputRow((1,) * TOKENS, 555, TOKENS, tuple(range(PAGES))) for _ in range(sessions)]


# ---------------------------------------------------------------- results


async def measure(counts: list[int], calls: int, rounds: int, pause_s: float) -> dict[str, Any]:
    os.sched_setaffinity(0, {CORES[0]})
    with tempfile.TemporaryDirectory() as folder:
        arrivals = {name: multiprocessing.Array("d", 1) for name in ("memory", "socket", "gloo")}
        # Receivers are forked before the first thread starts.
        sends = {
            "memory": memory_forward(arrivals["memory"]),
            "socket": socket_forward(arrivals["socket"]),
            "gloo": gloo_forward(arrivals["gloo"], folder),
        }
        started = {"memory": await memory_call(), "socket": await socket_call(), "spinning": await spinning_call()}
        calling = {name: call for name, (call, _) in started.items()} | {"thread": thread_call()}
        found: dict[str, dict[int, dict[str, list[float]]]] = {"call": {}, "forward": {}}
        for count in counts:
            call_times = found["call"][count] = {name: [] for name in calling}
            send_times = found["forward"][count] = {name: [] for name in sends}
            for _ in range(rounds):
                for name, call in calling.items():
                    call_times[name].append(await call_us(call, BYTES_PER_SESSION * count, calls, pause_s))
                for name, (send, _) in sends.items():
                    send_times[name].append(forward_us(send, arrivals[name], rows_of(count), calls, pause_s))
        receivers = {f"forward, {name}": receiver for name, (_, receiver) in sends.items()}
        receivers |= {f"call, {name}": receiver for name, (_, receiver) in started.items()}
        idle = {name: receiver.idle_ms() for name, receiver in receivers.items()}
        for receiver in receivers.values():
            receiver.end()
    return {"us": found, "idle_ms": idle, "pause_us": 1e6 * pause_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="1,16,64,256")
    parser.add_argument("--calls", type=int, default=1000, help="messages per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-us", type=float, default=500, help="pause before each message")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.sessions.split(",")]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as Ray's workers
        result = runner.run(measure(counts, arguments.calls, arguments.rounds, 1e-6 * arguments.pause_us))
    table = Table("us, median (range of the rounds)", *map(str, counts))
    for link, by_count in result["us"].items():
        for name in by_count[counts[0]]:
            cells = [by_count[count][name] for count in counts]
            shown = [f"{statistics.median(us):.0f} ({min(us):.0f} to {max(us):.0f})" for us in cells]
            table.add_row(f"{link}, {name}", *shown)
    Console().print(table)
    Console().print("idle, ms per second:", {name: round(ms, 2) for name, ms in result["idle_ms"].items()})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    os._exit(0)  # gloo would wait for its peer


if __name__ == "__main__":
    main()
