"""Emulates a second machine: a network namespace behind a link that delays and drops packets.

The link is two TUN devices joined by a process, which holds each IP packet for the configured delay and drops a share
of them. The kernel's own TCP runs above it, so retransmission and congestion control are real. Unlike netem, it needs
no kernel module. Needs root.
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
PACKETS = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI: raw IP packets without a header
PACKET_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Line:
    """Link properties: one-way delay in seconds, and share of packets lost."""

    delay_s: float = 0.0
    loss: float = 0.0

    @property
    def name(self) -> str:
        lost = f", {100 * self.loss:g} % lost" if self.loss else ""
        return f"{1e3 * self.delay_s:g} ms{lost}"


class FarLink:
    """Link to the namespace; its properties can change while packets are in flight."""

    def __init__(self, orders: Connection) -> None:
        self._orders = orders

    def set_line(self, line: Line) -> None:
        self._orders.send(line)


@contextmanager
def far_link() -> Iterator[FarLink]:
    """Creates the namespace and the link, and removes them on exit."""
    ip("netns", "add", NAMESPACE)
    context = mp.get_context("spawn")
    orders, child_end = context.Pipe()
    process = context.Process(target=_carry, args=(child_end,), daemon=True)
    try:
        process.start()
        child_end.close()
        orders.recv()  # both devices exist
        yield FarLink(orders)
    finally:
        process.kill()
        process.join()
        ip("netns", "delete", NAMESPACE)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _device(address: str) -> int:
    """Creates a TUN device that exists as long as the returned file descriptor is open."""
    opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(opened, SET_INTERFACE, struct.pack("16sH", DEVICES[address].encode(), PACKETS))
    return opened


def _carry(orders: Connection) -> None:
    """Configures both ends, then forwards packets until killed."""
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
    """Runs a Ray node in the namespace, and stops all of its processes on exit."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    started = [*ray, f"--address={gcs_address}", f"--node-ip-address={THERE}", *arguments]
    node = subprocess.Popen(["ip", "netns", "exec", NAMESPACE, *started], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        node.terminate()
        node.wait()
