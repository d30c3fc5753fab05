"""A network of two machines on one: a namespace of the kernel's, and a line to it that delays and loses packets.

The line is two TUN devices with a process between them, which holds every IP packet for as long as it is told and
drops some. TCP above it is the kernel's own: it waits, retransmits and slows down as over a real line, without needing
the kernel's netem, which not every kernel has. Needs root.
"""

import fcntl
import heapq
import multiprocessing as mp
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

NAMESPACE = "slipstream-far"
HERE = "10.77.0.1"
THERE = "10.77.0.2"
DEVICES = {HERE: "slip-here", THERE: "slip-there"}
SET_INTERFACE = 0x400454CA  # TUNSETIFF
PACKETS = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI: whole IP packets, nothing before them
PACKET_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Line:
    """Properties of the line: one-way delay in seconds, and the share of packets lost."""

    delay_s: float = 0.0
    loss: float = 0.0

    @property
    def name(self) -> str:
        lost = f", {100 * self.loss:g} % lost" if self.loss else ""
        return f"{1e3 * self.delay_s:g} ms{lost}"


class FarLink:
    """The line to the namespace, whose state can be changed while it is in use."""

    def __init__(self, orders: Connection) -> None:
        self._orders = orders

    def become(self, line: Line) -> None:
        self._orders.send(line)


@contextmanager
def far_link() -> Iterator[FarLink]:
    """The namespace and the line, while a block of code runs."""
    ip("netns", "add", NAMESPACE)
    context = mp.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=_carry, args=(theirs,), daemon=True)
    try:
        process.start()
        theirs.close()
        orders.recv()  # both devices are there
        yield FarLink(orders)
    finally:
        process.kill()
        process.join()
        ip("netns", "delete", NAMESPACE)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _device(address: str) -> int:
    """A TUN device; it is there as long as what is returned is open."""
    opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(opened, SET_INTERFACE, struct.pack("16sH", DEVICES[address].encode(), PACKETS))
    return opened


def _carry(orders: Connection) -> None:
    """Sets both ends up, then carries packets until it is killed."""
    here, there = _device(HERE), _device(THERE)
    ip("addr", "add", f"{HERE}/24", "dev", DEVICES[HERE])
    ip("link", "set", DEVICES[HERE], "up")
    ip("link", "set", DEVICES[THERE], "netns", NAMESPACE)
    ip("-n", NAMESPACE, "addr", "add", f"{THERE}/24", "dev", DEVICES[THERE])
    ip("-n", NAMESPACE, "link", "set", DEVICES[THERE], "up")
    ip("-n", NAMESPACE, "link", "set", "lo", "up")
    orders.send("ready")
    carry({here: there, there: here}, orders)


def carry(ends: dict[int, int], orders: Connection) -> None:
    """Forwards packets in order of arrival; returns when the control pipe closes."""
    line = Line()
    drawn = random.Random(0)
    due: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select([*ends, orders], [], [], wait_s)
        now = time.monotonic()
        for end in ready:
            if end is orders:
                try:
                    line = orders.recv()
                except EOFError:
                    return
            else:
                packet = os.read(end, PACKET_BYTES)
                if drawn.random() >= line.loss:
                    heapq.heappush(due, (now + line.delay_s, count, ends[end], packet))
                    count += 1
        while due and due[0][0] <= now:
            _, _, end, packet = heapq.heappop(due)
            os.write(end, packet)


@contextmanager
def far_node(gcs_address: str, *arguments: str) -> Iterator[None]:
    """A Ray node in the namespace, while a block of code runs; all of its processes end with it."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    started = [*ray, f"--address={gcs_address}", f"--node-ip-address={THERE}", *arguments]
    node = subprocess.Popen(["ip", "netns", "exec", NAMESPACE, *started], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        node.terminate()
        node.wait()
