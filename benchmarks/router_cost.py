"""Measures the cost of HTTP and routing: streams through the full system around a model that takes no time.

    PYTHONPATH=. python benchmarks/router_cost.py --streams 64 --tokens 256 --drafted 0 --json router_cost.json
    git worktree add /tmp/older COMMIT && PYTHONPATH=. python benchmarks/router_cost.py --rounds 5 --against /tmp/older

The API and the router share one process, and the benchmark measures its CPU time. Target and drafter share a second
process, and the clients run in a third; all use real HTTP and gRPC on loopback (`router_cost_server.py`). The model is
a lookup table. Cost depends on the number of verdicts, so the table also shows tokens per verdict; `--drafted 0` makes
it one.

`--against` adds another checkout's processes, which alternate with this one's in each round because machine speed
drifts. The profile covers this checkout, in a separate run because profiling slows the server down.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from router_cost_server import served

TOP = 5
HERE = Path(__file__).resolve().parent
PRESENT = "this checkout"
OTHER = "the other"


@dataclass(frozen=True)
class Asked:
    """The load of one run."""

    streams: int
    tokens: int  # per stream
    drafted: int | None  # maximum draft length; None: the server's choice

    @property
    def body(self) -> str:
        """Returns the body of each stream's request."""
        asked = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        speculation = {} if self.drafted is None else {"speculation": {"draft_tokens": self.drafted}}
        return json.dumps({**asked, "stream": True, **speculation})


@dataclass(frozen=True)
class Cost:
    """Time and CPU time of one run."""

    tokens: int
    seconds: float
    cpu_s: float  # CPU time of the process with the API and the router
    verdicts: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def us_per_token(self) -> float:
        """Returns microseconds of CPU time per token."""
        return 1e6 * self.cpu_s / self.tokens

    @property
    def tokens_per_verdict(self) -> float:
        return self.tokens / self.verdicts


@dataclass(frozen=True)
class ServerProcess:
    """Running API and router of a checkout."""

    url: str
    process: psutil.Process

    async def run(self, asked: Asked) -> Cost:
        verdicts = self._verdicts()
        cpu_s = self._cpu_s()
        seconds = await clients(self.url, asked.body, asked.streams)
        cpu_s = self._cpu_s() - cpu_s
        return Cost(asked.streams * asked.tokens, seconds, cpu_s, self._verdicts() - verdicts)

    def _cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def _verdicts(self) -> float:
        page = httpx.get(f"{self.url}/metrics", trust_env=False).text
        families = {family.name: family for family in text_string_to_metric_families(page)}
        return families["slipstream_verifies"].samples[0].value


@asynccontextmanager
async def started(checkout: Path, *arguments: str) -> AsyncIterator[tuple[Any, int]]:
    """Runs a process of the checkout; yields what it prints and its process id, and stops it on exit."""
    command = (sys.executable, str(HERE / "router_cost_server.py"), *arguments)
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    process = await asyncio.create_subprocess_exec(*command, cwd=checkout, env=environment, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise SystemExit(f"{arguments[0]} of {checkout} did not start; see the output above")
    try:
        yield json.loads(line), process.pid
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def server_of(checkout: Path) -> AsyncIterator[ServerProcess]:
    """Runs the checkout's API and router, with its target and drafter in another process."""
    async with started(checkout, "peers") as (addresses, _), started(checkout, "api", json.dumps(addresses)) as api:
        url, pid = api
        yield ServerProcess(url, psutil.Process(pid))


async def clients(url: str, body: str, streams: int) -> float:
    """Runs the clients in a child process; returns the elapsed seconds that they measured."""
    command = (sys.executable, str(HERE / "stream_clients.py"), url, body, str(streams))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"the clients failed with status {process.returncode}; see their output above")
    return float(json.loads(output))


async def measure(checkouts: Mapping[str, Path], asked: Asked, rounds: int) -> dict[str, list[Cost]]:
    """Returns each checkout's costs by round; every other round runs the checkouts in reverse order."""
    costs: dict[str, list[Cost]] = {name: [] for name in checkouts}
    async with AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(server_of(path)) for name, path in checkouts.items()}
        for server in servers.values():
            await clients(server.url, asked.body, 1)  # warm-up
        for number in range(rounds):
            order = list(servers) if number % 2 == 0 else list(reversed(servers))
            for name in order:
                costs[name].append(await servers[name].run(asked))
    return costs


async def profile(asked: Asked) -> list[dict[str, Any]]:
    """Profiles this checkout's server in this process; returns its most expensive functions."""
    async with started(HERE.parent, "peers") as (addresses, _), served(addresses) as url:
        await clients(url, asked.body, 1)
        profiling = cProfile.Profile(time.thread_time)  # CPU time, which excludes waiting
        profiling.enable()
        await clients(url, asked.body, asked.streams)
        profiling.disable()
    return most_expensive(profiling)


def most_expensive(profiling: cProfile.Profile, top: int = TOP) -> list[dict[str, Any]]:
    """Returns the functions with the most CPU time of their own in the event loop's thread."""
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profiling).stats  # type: ignore[attr-defined]
    found = [
        {"function": f"{Path(file).name}:{line} {name}", "calls": calls, "own_s": round(own_s, 4)}
        for (file, line, name), (_, calls, own_s, _, _) in stats.items()
    ]
    return sorted(found, key=lambda one: -one["own_s"])[:top]


def shown(costs: Mapping[str, Sequence[Cost]], asked: Asked) -> Table:
    """Formats medians of the rounds, and the ratio of this checkout to the other with its range over the rounds."""
    table = Table(
        "",
        "tokens/s",
        "processor time a token",
        "tokens a verdict",
        title=f"{asked.streams} streams of {asked.tokens} tokens",
    )
    for name, runs in costs.items():
        rate = statistics.median(run.tokens_per_s for run in runs)
        cost_us = statistics.median(run.us_per_token for run in runs)
        length = statistics.median(run.tokens_per_verdict for run in runs)
        table.add_row(name, f"{rate:.0f}", f"{cost_us:.1f} us", f"{length:.2f}")
    if OTHER in costs:
        pairs = list(zip(costs[PRESENT], costs[OTHER], strict=True))
        rates = [present.tokens_per_s / other.tokens_per_s for present, other in pairs]
        times = [present.us_per_token / other.us_per_token for present, other in pairs]
        table.add_row("ratio", _spread(rates), _spread(times))
    return table


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measures the cost of HTTP and the router.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per stream")
    parser.add_argument("--drafted", type=int, help="maximum draft length; 0: non-speculative decoding")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of this project to measure")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args(arguments)
    asked = Asked(options.streams, options.tokens, options.drafted)
    checkouts = {PRESENT: HERE.parent} | ({OTHER: options.against.resolve()} if options.against else {})
    costs = asyncio.run(measure(checkouts, asked, options.rounds))
    Console().print(shown(costs, asked))
    top = asyncio.run(profile(asked))
    for one in top:
        print(f"  {one['own_s']:.3f} s in {one['calls']} calls  {one['function']}")
    if options.json is not None:
        runs = {name: [asdict(run) for run in found] for name, found in costs.items()}
        options.json.write_text(json.dumps({**asdict(asked), "runs": runs, "profile": top}, indent=1))


if __name__ == "__main__":
    main()
