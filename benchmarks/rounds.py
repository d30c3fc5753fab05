"""Interleaved rounds over HTTP, and the ratios of their arms.

In each round, every batch of prompts runs under all arms, one right after the other, and the first arm rotates. At a
concurrency above 1, a batch holds several prompts per concurrent request, the next one is sent when one is answered,
and batches are mixed anew in every round.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Tally, TimedAnswer
from tools.bench.experiment import WARM_UP_TOKENS, Prompt, prompt_batches
from tools.bench.latencies import Batch, Speedup, speedup
from tools.bench.tables import speedups_table

TURNOVER = 3  # prompts of a batch per concurrent request


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to get the answers."""

    name: str
    server: str
    draft_tokens: int | None = None  # None: as the server is configured


@dataclass(frozen=True, slots=True)
class Rounds:
    """Parameters of a measurement."""

    arms: tuple[Arm, ...]
    ratios: tuple[tuple[str, str], ...]  # names of the arms to compare, each with its baseline
    concurrencies: tuple[int, ...]
    rounds: int
    tokens: int
    json: Path | None
    temperature: float = 0.0

    @classmethod
    def of(cls, arguments: argparse.Namespace, arms: Sequence[Arm], ratios: Sequence[tuple[str, str]]) -> "Rounds":
        at_once = tuple(int(part) for part in arguments.concurrency.split(","))
        asked = arguments.rounds, arguments.tokens, arguments.json
        return cls(tuple(arms), tuple(ratios), at_once, *asked, getattr(arguments, "temperature", 0.0))


def add_options(parser: argparse.ArgumentParser, concurrency: str = "1,4,16", tokens: int = 64) -> None:
    """Adds the options that `Rounds.of` reads."""
    parser.add_argument("--concurrency", default=concurrency)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens per answer")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements here, after each concurrency")


async def measure(
    plan: Rounds,
    urls: Mapping[str, str],
    prompts: Sequence[Prompt],
    facts: Mapping[str, Any],
    during: Callable[[Arm], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> list[Batch]:
    """Runs all rounds; prints ratios and writes JSON, with `facts`, after every concurrency of every round.

    `during` surrounds each batch of an arm.
    """
    batches: list[Batch] = []
    async with AsyncExitStack() as stack:
        endpoints = {name: await stack.enter_async_context(ChatEndpoint.at(url)) for name, url in urls.items()}
        for name, endpoint in endpoints.items():
            warm_up = Arm("", name)
            await _batch(endpoint, warm_up, prompts, len(prompts), WARM_UP_TOKENS, plan.temperature, 0, -1)
        for number in range(plan.rounds):
            for at_once in plan.concurrencies:
                order = random.Random(number).sample(list(prompts), len(prompts))
                parts = prompt_batches(order if at_once > 1 else prompts, 1 if at_once == 1 else TURNOVER * at_once)
                shown = track(parts, f"Round {number + 1}, {at_once}", console=Console(stderr=True))
                for place, part in enumerate(shown):
                    index = place if at_once == 1 else number * len(parts) + place
                    first = (number + place) % len(plan.arms)
                    for arm in plan.arms[first:] + plan.arms[:first]:
                        endpoint = endpoints[arm.server]
                        with during(arm):
                            batches.append(
                                await _batch(endpoint, arm, part, at_once, plan.tokens, plan.temperature, index, number)
                            )
                _report(plan, batches, facts)
    return batches


async def _batch(
    endpoint: ChatEndpoint,
    arm: Arm,
    prompts: Sequence[Prompt],
    at_once: int,
    tokens: int,
    temperature: float,
    index: int,
    number: int,
) -> Batch:
    model = await endpoint.model()
    places = asyncio.Semaphore(at_once)
    began = time.perf_counter()

    async def ask(prompt: Prompt) -> TimedAnswer:
        async with places:
            return await endpoint.ask(model, ChatQuestion(prompt.prompt, tokens, True, arm.draft_tokens, temperature))

    answers = await asyncio.gather(*map(ask, prompts))
    seconds = time.perf_counter() - began
    kinds = tuple(prompt.kind for prompt in prompts)
    return Batch(arm.name, at_once, index, number, seconds, Tally(), kinds, tuple(answers))


def speedups(plan: Rounds, batches: Sequence[Batch]) -> list[Speedup]:
    """Returns the ratios of tokens per second, of concurrencies with at least two batches."""
    found = []
    for at_once in plan.concurrencies:
        of = {arm.name: [b for b in batches if (b.arm, b.concurrency) == (arm.name, at_once)] for arm in plan.arms}
        found += [
            speedup(of[name], of[base]) for name, base in plan.ratios if len({batch.index for batch in of[name]}) > 1
        ]
    return found


def accepted_shares(batches: Sequence[Batch]) -> dict[tuple[str, int], float]:
    """Returns the share of answer tokens that drafters proposed, by arm and concurrency; 0: nothing was drafted."""
    accepted: Counter[tuple[str, int]] = Counter()
    tokens: Counter[tuple[str, int]] = Counter()
    for batch in batches:
        accepted[batch.arm, batch.concurrency] += sum(answer.accepted for answer in batch.answers)
        tokens[batch.arm, batch.concurrency] += sum(answer.tokens for answer in batch.answers)
    return {key: accepted[key] / count for key, count in tokens.items()}


def _report(plan: Rounds, batches: Sequence[Batch], facts: Mapping[str, Any]) -> None:
    found = speedups(plan, batches)
    Console().print(speedups_table(found))
    shares = [f"{arm} at {at_once}: {share:.0%}" for (arm, at_once), share in accepted_shares(batches).items()]
    Console().print(f"Share of tokens that drafters proposed: {', '.join(shares)}")
    if plan.json:
        data = {**facts, "speedups": [asdict(one) for one in found], "batches": [asdict(batch) for batch in batches]}
        plan.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
