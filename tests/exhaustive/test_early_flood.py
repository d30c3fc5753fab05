"""What a drafter costs others that sends what nobody asked for at full speed: running streams lose less than a tenth.

Not part of the default suite: `make test-exhaustive`. The steps of the target take as long as a real model's, but no
processor; the loop that serves all streams has a core, and the peer that floods another.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.integration.harness import Cluster, cluster, plain_greedy

SESSIONS = 8
TOKENS = 200
ROUNDS = 5
MOST = 1.1  # times the time without the flood
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def flooded(address: str, kind: str, messages_a_frame: int) -> AsyncIterator[None]:
    command = [sys.executable, "-m", "tests.exhaustive.flooding_peer", address, kind, str(messages_a_frame)]
    peer = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert peer.stdout is not None
        assert await peer.stdout.readline() == b"floods\n"
        yield
    finally:
        peer.kill()
        await peer.wait()


async def seconds(c: Cluster) -> float:
    """For all sessions at once."""
    began = time.perf_counter()
    texts = await asyncio.gather(*(c.tokens(c.generation(max_len=3 + TOKENS)) for _ in range(SESSIONS)))
    took = time.perf_counter() - began
    assert all(text == plain_greedy((1, 2, 3), TOKENS) for text in texts)
    return took


FLOODS = [("blocks", 1), ("blocks", 64), ("blocks", 1024), ("words", 1024)]


@pytest.mark.parametrize(("kind", "messages_a_frame"), FLOODS, ids=[f"{most} {kind} a frame" for kind, most in FLOODS])
async def test_what_nobody_asked_for_at_full_speed(kind: str, messages_a_frame: int) -> None:
    if len(cores := sorted(os.sched_getaffinity(0))) > 1:
        os.sched_setaffinity(0, cores[:1])  # the loop's; what is started meanwhile moves to the others
    try:
        async with cluster() as c:
            (address,) = c.targets
            (target,) = c.targets.values()
            await seconds(c)
            ratios = []
            for _ in range(ROUNDS):
                alone_s = await seconds(c)
                before = target.scheduler.unasked
                async with flooded(address, kind, messages_a_frame):
                    flooded_s = await seconds(c)
                heard = target.scheduler.unasked - before
                ratios.append(flooded_s / alone_s)
                print(f"\nalone {alone_s:.2f} s, flooded {flooded_s:.2f} s, {heard / flooded_s:.0f} {kind}/s heard")
    finally:
        os.sched_setaffinity(0, cores)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"{messages_a_frame} {kind} a frame: {median(ratios):.3f} times as long ({spread})")
    assert median(ratios) < MOST
