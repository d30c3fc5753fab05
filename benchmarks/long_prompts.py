"""Measures the delay that a long prompt causes in running streams, and the time saved by a shared prefix.

    python benchmarks/long_prompts.py [--json FILE]

Serves the demo pair without speculation. First measures the worst gap between two tokens of eight running streams,
with and without the arrival of a 3000-token prompt, and the duration of a full step. Then measures the time to first
token for a 1000-token system prompt, and for a second request with the same system prompt.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from serve_app.cli.demo import demo_config
from serve_app.operations.local import serving

PLAIN = {"draft_tokens": 0}
RUNNING = 8
RUNNING_TOKENS = 160
LONG_TOKENS = 3000
SYSTEM_TOKENS = 1000


class Client:
    """Streams completions of token-id prompts."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=300)
        self._model = model

    async def times(self, prompt: list[int], max_tokens: int) -> list[float]:
        """Returns the seconds from the request to each chunk."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        extensions = {"stream": True, "ignore_eos": True, "speculation": PLAIN}
        began = time.perf_counter()
        found = []
        async with self._http.stream("POST", "/v1/completions", json={**body, **extensions}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    found.append(time.perf_counter() - began)
        return found


def tokens(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(100, 20_000) for _ in range(count)]


def worst_gap(streams: list[list[float]]) -> float:
    return max(later - earlier for times in streams for earlier, later in itertools.pairwise(times))


async def gaps(client: Client, long: list[int] | None) -> tuple[float, float]:
    """Returns the worst gap of the running streams and the long prompt's time to first token, in seconds."""
    running = [asyncio.create_task(client.times(tokens(24, seed), RUNNING_TOKENS)) for seed in range(RUNNING)]
    first = 0.0
    await asyncio.sleep(2.0)  # until all streams are decoding
    if long is not None:
        first = (await client.times(long, 2))[0]
    # The first gaps come from the streams' own prompts.
    return worst_gap([times[8:] for times in await asyncio.gather(*running)]), first


async def shared_beginning(client: Client, rounds: int) -> tuple[float, float]:
    """Returns the median time to first token of a request, and of a second one with the same prefix."""
    firsts = []
    seconds = []
    for number in range(rounds):
        system = tokens(SYSTEM_TOKENS, 1000 + number)
        firsts.append((await client.times(system + tokens(20, 1), 2))[0])
        seconds.append((await client.times(system + tokens(20, 2), 2))[0])
    return statistics.median(firsts), statistics.median(seconds)


async def measure(url: str, model: str, full_step_s: float) -> dict[str, Any]:
    client = Client(url, model)
    await client.times(tokens(24, 0), 8)
    plain = [(await gaps(client, None))[0] for _ in range(3)]
    among = [await gaps(client, tokens(LONG_TOKENS, seed)) for seed in (97, 98, 99)]  # new, so uncached
    first, second = await shared_beginning(client, 5)
    return {
        "full_step_s": full_step_s,
        "worst_gap_s": statistics.median(plain),
        "worst_gap_with_a_long_prompt_s": statistics.median(gap for gap, _ in among),
        "long_prompt_first_token_s": statistics.median(first for _, first in among),
        "first_token_s": first,
        "first_token_with_shared_beginning_s": second,
        "share": second / first,
    }


async def full_step(url: str, model: str, step_tokens: int) -> float:
    """Returns the seconds of a full prefill step at the end of a long context, the most expensive chunk."""
    client = Client(url, model)
    whole = [(await client.times(tokens(LONG_TOKENS, seed), 2))[0] for seed in (7, 8, 9)]
    less = [(await client.times(tokens(LONG_TOKENS - step_tokens, seed), 2))[0] for seed in (17, 18, 19)]
    return statistics.median(whole) - statistics.median(less)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    arguments = parser.parse_args()
    config = demo_config(["server.port=0", "model.max_context=4096"])
    with serving(config, Console(stderr=True)) as url:
        name = config.model.name
        step_s = asyncio.run(full_step(url, name, config.target.max_step_tokens))
        measured = asyncio.run(measure(url, name, step_s))
    Console().print({key: round(value, 3) for key, value in measured.items()})
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
