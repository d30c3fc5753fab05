"""What HTTP and the router cost: streams of a target that answers at once, through everything but models.

    python benchmarks/router_cost.py --streams 64 --tokens 256 --json router_cost.json

The API, the router, a drafter and a target replica run here, over real HTTP and gRPC on loopback, around a model that
is one table: what is left is text, ledgers, scheduling and messages. All of it is one process and one event loop, so
that its processor time a token can be told from the clients', who are a process of their own. A first run is timed, a
second one is profiled, for a profile slows down what it looks at.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn

from cluster.config import validated
from serve_app.http.api import create_api
from serve_app.http.metrics import Metrics
from serve_app.http.text import TextCodec
from serve_app.http.wire.replies import HealthReport
from tests.byte_tokenizer import byte_tokenizer
from tests.integration.harness import CONTEXT, PAGE_SIZE, cluster

TOP = 5
SESSIONS = 64  # that the target serves at once


@dataclass(frozen=True)
class Cost:
    """Of one run."""

    streams: int
    tokens: int
    seconds: float
    cpu_s: float  # of the process with the API, router, drafter and target

    @property
    def shown(self) -> str:
        rate = self.tokens / self.seconds
        cost_us = 1e6 * self.cpu_s / self.tokens
        return f"{self.streams} streams: {rate:.0f} tokens/s, {cost_us:.0f} us of processor time a token"


def body(tokens: int, drafted: int | None) -> str:
    """Of each stream's request."""
    asked = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    speculation = {} if drafted is None else {"speculation": {"max_draft_tokens": drafted}}
    return json.dumps({**asked, "stream": True, **speculation})


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """The API in front of a toy cluster whose steps take no time; its address."""
    tokenizer = byte_tokenizer()
    config = validated(
        {
            "model": {"target": "toy", "max_context": CONTEXT},
            "draft": {"method": "prompt_lookup"},
            "speculation": {"max_draft_tokens": 4},
        }
    )

    async def ready() -> HealthReport:
        return HealthReport(status="ok", audit="off")

    async with cluster(sessions=SESSIONS, pages=SESSIONS * CONTEXT // PAGE_SIZE) as toy:
        toy.hurry()
        codec = TextCodec(tokenizer, (tokenizer.eos_token_id,))
        api = create_api(toy.router, codec, config, Metrics(model="toy"), ready)
        server = uvicorn.Server(uvicorn.Config(api, log_level="error", lifespan="off"))
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:  # who comes early waits in it
            serving = asyncio.create_task(server.serve([listening]))
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True
            await serving


async def timed(url: str, streams: int, tokens: int, drafted: int | None) -> Cost:
    """One run, after a stream that warms everything up."""
    await _clients(url, body(tokens, drafted), 1)
    cpu = _cpu_s()
    seconds = await _clients(url, body(tokens, drafted), streams)
    return Cost(streams, streams * tokens, seconds, _cpu_s() - cpu)


async def _clients(url: str, asked: str, streams: int) -> float:
    """Seconds that they took, as they measured it themselves."""
    command = [sys.executable, str(Path(__file__).with_name("stream_clients.py")), url, asked, str(streams)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"the clients failed with status {process.returncode}")
    return float(json.loads(said))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def hottest(profile: cProfile.Profile, top: int = TOP) -> list[dict[str, Any]]:
    """The functions that most processor time went to, of the event loop's thread."""
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = [
        {"function": f"{Path(file).name}:{line} {name}", "calls": calls, "own_s": round(own_s, 4)}
        for (file, line, name), (_, calls, own_s, _, _) in stats.items()
    ]
    return sorted(found, key=lambda one: -one["own_s"])[:top]


async def measure(streams: int, tokens: int, drafted: int | None) -> tuple[Cost, list[dict[str, Any]]]:
    async with served() as url:
        cost = await timed(url, streams, tokens, drafted)
        profile = cProfile.Profile(time.thread_time)  # the processor's, and so nothing of waiting
        profile.enable()
        await timed(url, streams, tokens, drafted)
        profile.disable()
    return cost, hottest(profile)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What HTTP and the router cost.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--drafted", type=int, help="most draft tokens of a block; 0: plain decoding")
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    cost, top = asyncio.run(measure(options.streams, options.tokens, options.drafted))
    print(cost.shown)
    for one in top:
        print(f"  {one['own_s']:.3f} s in {one['calls']} calls  {one['function']}")
    if options.json is not None:
        options.json.write_text(json.dumps({**asdict(cost), "profile": top}, indent=1))


if __name__ == "__main__":
    main()
