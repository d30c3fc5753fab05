"""Measures whether sending hidden states to a drafter delays the first token of a long prompt.

    python benchmarks/states_first_token.py [--arm "eagle3 at target"] [--rounds 20] [--prompt 1500] [--json OUT]

Serves the demo's target with a random-weight head (`random_heads.py`) over HTTP, with target and drafter pinned to one
core each. A pair is two prompts with the same number of random tokens on the same server, one with and one without
speculation, in alternating order. The reported ratio is their times to first token; an interval that contains 1 means
no measurable cost. The lock-step schedule sends the states of every prompt, regardless of the expected gain.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from servers import OTHERS_CORE, PINNED, side_by_side
from states_wire import ARMS, chosen

from cluster.errors import SlipstreamError
from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.endpoint_client import TIMEOUT
from serve_app.operations.ray_cluster import broadcast, deployed
from serve_app.tables import shown, table
from tools.bench.latencies import mean_ratio

ANSWER = 8  # tokens per answer; only the first is timed
TOKENS = range(100, 20_000)  # token ids for random prompts
DRAFTED = "drafted for"
PLAIN = "plain"
SPECULATION: Mapping[str, dict[str, int]] = {DRAFTED: {}, PLAIN: {"draft_tokens": 0}}


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds to first token, with and without speculation."""

    drafted: float
    plain: float


class Client:
    """Streams completions of token-id prompts."""

    def __init__(self, http: httpx.AsyncClient, model: str, prompt_tokens: int) -> None:
        self._http = http
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._random = random.Random(0)

    async def pair(self, number: int) -> Pair:
        arms = (DRAFTED, PLAIN) if number % 2 else (PLAIN, DRAFTED)
        found = {arm: await self._first_token_s(arm) for arm in arms}
        return Pair(found[DRAFTED], found[PLAIN])

    async def _first_token_s(self, arm: str) -> float:
        """Returns the seconds to first token of a new prompt; reads the whole answer."""
        body = {
            "model": self._model,
            "prompt": self._random.choices(TOKENS, k=self._prompt_tokens),
            "max_tokens": ANSWER,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "speculation": SPECULATION[arm],
        }
        began = time.perf_counter()
        first_s = None
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if first_s is None and line.startswith("data: {"):
                    first_s = time.perf_counter() - began
        assert first_s is not None, "an answer has a token"
        return first_s


async def pairs(url: str, model: str, arguments: argparse.Namespace) -> list[Pair]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, trust_env=False) as http:
        client = Client(http, model, arguments.prompt)
        await client.pair(0)  # warm-up
        numbers = track(range(arguments.rounds), "Pairs", console=Console(stderr=True))
        return [await client.pair(number) for number in numbers]


def states_sent() -> dict[str, int]:
    """Returns the rows and bytes that the target has sent, both with verdicts and in separate messages."""
    (target,) = broadcast(deployed("Target", APPLICATION), "inspect")
    counts: dict[str, int] = target["states"]
    return counts


def show(arguments: argparse.Namespace, found: list[Pair], sent: Mapping[str, int]) -> None:
    mean, low, high = mean_ratio([pair.drafted / pair.plain for pair in found])
    made = table(f"First token of {arguments.prompt} tokens, {arguments.arm}", "what", "value")
    made.add_row("drafted for, ms (median)", shown(1e3 * statistics.median([pair.drafted for pair in found]), ".0f"))
    made.add_row("plain, ms (median)", shown(1e3 * statistics.median([pair.plain for pair in found]), ".0f"))
    made.add_row("drafted for / plain", f"{mean:.3f} ({low:.3f} to {high:.3f})")
    made.add_row("states sent apart, bytes a prompt", shown(sent["apart_bytes"] / (len(found) + 1), ".0f"))
    Console().print(made)
    if arguments.json:
        data: dict[str, Any] = {
            "arm": arguments.arm,
            "prompt_tokens": arguments.prompt,
            "ratio": [mean, low, high],
            "states": dict(sent),
            "pairs": [asdict(pair) for pair in found],
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", default="eagle3 at target", help=f"one of {', '.join(arm.name for arm in ARMS)}")
    parser.add_argument("--rounds", type=int, default=20, help="number of pairs")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens per prompt")
    parser.add_argument("--schedule", choices=("lock_step", "adaptive"), default="lock_step")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements here")
    arguments = parser.parse_args()
    (arm,) = chosen(arguments.arm, parser)
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2 for an interval")
    console = Console(stderr=True)
    try:
        target = Path(demo_config().model.target)
        prepare_target(target, console)
        with TemporaryDirectory() as scratch:
            pinned = f"{{num_cpus: 0.1, cpu_affinity: [{OTHERS_CORE}]}}"
            pacing = f"speculation.schedule={arguments.schedule}"
            context = f"model.max_context={arguments.prompt + ANSWER}"
            config = demo_config([*PINNED, arm.draft(target, Path(scratch), pinned), pacing, context])
            with side_by_side({APPLICATION: config}, console) as servers:
                (server,) = servers.values()
                found = asyncio.run(pairs(server.url, config.model.name, arguments))
                sent = states_sent()
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    show(arguments, found, sent)


if __name__ == "__main__":
    main()
