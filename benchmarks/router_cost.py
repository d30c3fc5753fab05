"""Measures the cost of HTTP and the router: streams of a target that answers at once, through everything but models.

    python benchmarks/router_cost.py --streams 64 --tokens 256 --json router_cost.json
    git worktree add /tmp/older COMMIT && python benchmarks/router_cost.py --rounds 5 --against /tmp/older

The API, the router, a drafter and a target replica (`router_cost_server.py`) run in one process and one event loop,
over real HTTP and gRPC on loopback, around a model that is one table: what is left is text, ledgers, scheduling and
messages. The clients are a process of their own, so that the server's processor time a token can be told from theirs.

With `--against`, another checkout's server is measured too, in turn with this one's in each round, because machines
drift. The profile is of this checkout, in a run of its own, for a profile slows down what it looks at.
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

import psutil
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
    tokens: int  # of each stream
    drafted: int | None  # most draft tokens of a block; None: as the server will

    @property
    def body(self) -> str:
        """Returns the body of each stream's request."""
        asked = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        speculation = {} if self.drafted is None else {"speculation": {"draft_tokens": self.drafted}}
        return json.dumps({**asked, "stream": True, **speculation})


@dataclass(frozen=True)
class Cost:
    """Results of one run."""

    tokens: int
    seconds: float
    cpu_s: float  # of the process with the API, router, drafter and target

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def us_per_token(self) -> float:
        """Microseconds of processor time per token."""
        return 1e6 * self.cpu_s / self.tokens


@dataclass(frozen=True)
class ServerProcess:
    """A checkout's server."""

    url: str
    process: psutil.Process

    async def run(self, asked: Asked) -> Cost:
        cpu_s = self._cpu_s()
        seconds = await clients(self.url, asked.body, asked.streams)
        return Cost(asked.streams * asked.tokens, seconds, self._cpu_s() - cpu_s)

    def _cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def started(checkout: Path) -> AsyncIterator[ServerProcess]:
    """Its server, which ends with the block."""
    command = (sys.executable, str(HERE / "router_cost_server.py"))
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    process = await asyncio.create_subprocess_exec(*command, cwd=checkout, env=environment, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    if not url:
        raise SystemExit(f"the server of {checkout} did not start; what it said above tells why")
    try:
        yield ServerProcess(url, psutil.Process(process.pid))
    finally:
        process.stdin.close()
        await process.wait()


async def clients(url: str, body: str, streams: int) -> float:
    """Seconds that they took, as they measured it themselves."""
    command = (sys.executable, str(HERE / "stream_clients.py"), url, body, str(streams))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"the clients failed with status {process.returncode}")
    return float(json.loads(said))


async def measure(checkouts: Mapping[str, Path], asked: Asked, rounds: int) -> dict[str, list[Cost]]:
    """Returns the costs of each round by checkout; every other round begins with the last one."""
    costs: dict[str, list[Cost]] = {name: [] for name in checkouts}
    async with AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(started(path)) for name, path in checkouts.items()}
        for server in servers.values():
            await clients(server.url, asked.body, 1)  # warms everything up
        for number in range(rounds):
            order = list(servers) if number % 2 == 0 else list(reversed(servers))
            for name in order:
                costs[name].append(await servers[name].run(asked))
    return costs


async def profile(asked: Asked) -> list[dict[str, Any]]:
    """The first functions of this checkout's server, in this process."""
    async with served() as url:
        await clients(url, asked.body, 1)
        profiling = cProfile.Profile(time.thread_time)  # the processor's, and so nothing of waiting
        profiling.enable()
        await clients(url, asked.body, asked.streams)
        profiling.disable()
    return hottest(profiling)


def hottest(profiling: cProfile.Profile, top: int = TOP) -> list[dict[str, Any]]:
    """The functions that most processor time went to, of the event loop's thread."""
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profiling).stats  # type: ignore[attr-defined]
    found = [
        {"function": f"{Path(file).name}:{line} {name}", "calls": calls, "own_s": round(own_s, 4)}
        for (file, line, name), (_, calls, own_s, _, _) in stats.items()
    ]
    return sorted(found, key=lambda one: -one["own_s"])[:top]


def shown(costs: Mapping[str, Sequence[Cost]], asked: Asked) -> Table:
    """Medians of the rounds; the ratio is this checkout's over the other's, with the lowest and highest of a round."""
    table = Table("", "tokens/s", "processor time a token", title=f"{asked.streams} streams of {asked.tokens} tokens")
    for name, runs in costs.items():
        rate = statistics.median(run.tokens_per_s for run in runs)
        cost_us = statistics.median(run.us_per_token for run in runs)
        table.add_row(name, f"{rate:.0f}", f"{cost_us:.0f} us")
    if OTHER in costs:
        pairs = list(zip(costs[PRESENT], costs[OTHER], strict=True))
        rates = [present.tokens_per_s / other.tokens_per_s for present, other in pairs]
        times = [present.us_per_token / other.us_per_token for present, other in pairs]
        table.add_row("ratio", _spread(rates), _spread(times))
    return table


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What HTTP and the router cost.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--drafted", type=int, help="most draft tokens of a block; 0: non-speculative decoding")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout of this project, measured too")
    parser.add_argument("--json", type=Path, help="write everything here")
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
