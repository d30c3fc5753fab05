"""A drafter that sends early blocks at full speed costs running streams less than a tenth.

Not part of the default suite: `make test-exhaustive`. The target's steps take as long as a real model's but use no
processor; the loop that serves all streams has one core, and the flooding peer another.
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
MAX_SLOWDOWN = 1.1  # times the time without the flood
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def flooded(address: str, blocks_a_frame: int) -> AsyncIterator[None]:
    command = [sys.executable, "-m", "tests.exhaustive.flooding_peer", address, str(blocks_a_frame)]
    peer = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert peer.stdout is not None
        assert await peer.stdout.readline() == b"floods\n"
        yield
    finally:
        peer.kill()
        await peer.wait()


async def seconds(c: Cluster) -> float:
    """Returns the time for all sessions at once."""
    began = time.perf_counter()
    texts = await asyncio.gather(*(c.tokens(c.generation(max_len=3 + TOKENS)) for _ in range(SESSIONS)))
    took = time.perf_counter() - began
    assert all(text == plain_greedy((1, 2, 3), TOKENS) for text in texts)
    return took


@pytest.mark.parametrize("blocks_a_frame", [1, 64, 1024], ids=lambda blocks: f"{blocks} blocks a frame")
async def test_early_blocks_at_full_speed(blocks_a_frame: int) -> None:
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
                before = sum(target.scheduler.counts.dropped.values())
                async with flooded(address, blocks_a_frame):
                    flooded_s = await seconds(c)
                dropped = sum(target.scheduler.counts.dropped.values()) - before
                ratios.append(flooded_s / alone_s)
                print(f"\nalone {alone_s:.2f} s, flooded {flooded_s:.2f} s, {dropped / flooded_s:.0f} blocks/s dropped")
    finally:
        os.sched_setaffinity(0, cores)
    print(
        f"{blocks_a_frame} blocks a frame: {median(ratios):.3f} times as long ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    assert median(ratios) < MAX_SLOWDOWN
