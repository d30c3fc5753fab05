"""Measures how soon speculation pays again after other processes have used all cores.

    python benchmarks/busy_machine.py --json busy_machine.json

One request after the other streams from the demo's server. After a quiet time, two processes compute on both cores for
20 seconds. Reports characters per second before, during and after them, the same without speculation, and the seconds
until two seconds of text come at 95 % of the former rate.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from rich.console import Console
from servers import PINNED

from serve_app.cli.demo import demo_config
from serve_app.operations.local import serving

PROMPT = "Write a Python function that sorts a list of numbers, and explain each line."
WARM_UP_S, QUIET_S, BUSY_S, AFTER_S = 20.0, 20.0, 20.0, 20.0
WINDOW_S = 2.0
FORMER_SHARE = 0.95


def occupy(core: int, until: float) -> None:
    """Keeps one core busy until the monotonic clock reaches `until`."""
    os.sched_setaffinity(0, {core})
    while time.monotonic() < until:
        pass


async def text(url: str, model: str, draft_tokens: int | None) -> AsyncIterator[str]:
    """Yields text chunks of consecutive requests."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 200, "temperature": 0}
    speculation = {} if draft_tokens is None else {"speculation": {"draft_tokens": draft_tokens}}
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            asked = {**body, **speculation, "stream": True}
            async with client.stream("POST", f"{url}/v1/chat/completions", json=asked) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        yield json.loads(line[6:])["choices"][0]["delta"].get("content") or ""


class Arrivals:
    """Arrival times of characters."""

    def __init__(self) -> None:
        self._times: list[float] = []

    async def collect(self, url: str, model: str, seconds: float, draft_tokens: int | None = None) -> None:
        until = time.monotonic() + seconds
        async for chunk in text(url, model, draft_tokens):
            self._times += [time.monotonic()] * len(chunk)
            if time.monotonic() > until:
                return

    def rate(self, begin: float, end: float) -> float:
        """Returns characters per second."""
        return (bisect_left(self._times, end) - bisect_left(self._times, begin)) / (end - begin)

    def recovery_s(self, begin: float, rate: float) -> float | None:
        """Returns the seconds after `begin` until a window reaches the rate; None if none does."""
        for tenth in range(int(10 * (AFTER_S - WINDOW_S))):
            at = begin + tenth / 10
            if self.rate(at, at + WINDOW_S) >= rate:
                return at - begin
        return None


async def measure(url: str, model: str) -> dict[str, float | None]:
    plain = Arrivals()
    await plain.collect(url, model, WARM_UP_S, draft_tokens=0)
    warm = time.monotonic() + WARM_UP_S
    busy_at, quiet_at = warm + QUIET_S, warm + QUIET_S + BUSY_S
    arrivals = Arrivals()
    collecting = asyncio.create_task(arrivals.collect(url, model, quiet_at + AFTER_S - time.monotonic()))
    await asyncio.sleep(busy_at - time.monotonic())
    others = [multiprocessing.get_context("spawn").Process(target=occupy, args=(core, quiet_at)) for core in (0, 1)]
    for other in others:
        other.start()
    await collecting
    for other in others:
        other.join()
    before = arrivals.rate(warm, busy_at)
    return {
        "non-speculative": plain.rate(warm - 2 * WARM_UP_S + 5, warm - WARM_UP_S),
        "before": before,
        "busy": arrivals.rate(busy_at + 2, quiet_at),
        "after": arrivals.rate(quiet_at + 5, quiet_at + AFTER_S),
        "recovery_s": arrivals.recovery_s(quiet_at, FORMER_SHARE * before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the recovery of speculation after a busy time.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = demo_config(PINNED)
    with serving(config, Console(stderr=True)) as url:
        result = asyncio.run(measure(url, config.model.name))
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
