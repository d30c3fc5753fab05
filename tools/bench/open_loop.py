"""Open-loop load: requests arrive at random times at a mean rate, independent of earlier answers.

At each rate, the arms run in sequence, with the same requests at the same times.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from serve_app.endpoint_client import ChatEndpoint, EndpointError, TimedAnswer
from tools.bench.experiment import PLAIN, SPECULATIVE, WARM_UP_TOKENS, Prompt
from tools.bench.latencies import Latencies, LoadPoint

ARMS = {SPECULATIVE: None, PLAIN: 0}  # draft length limit by arm; None: the server's default


@dataclass(frozen=True, slots=True)
class Sweep:
    """Parameters of the sweep."""

    prompts: tuple[Prompt, ...]
    rates: tuple[float, ...]  # requests per second
    requests: int = 60  # number of requests per rate
    max_tokens: int = 96
    seed: int = 0  # seed of the arrival times

    @property
    def runs(self) -> int:
        return len(self.rates) * len(ARMS)


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Returns arrival times of a Poisson process, in seconds; the first request arrives at 0."""
    drawn = random.Random(seed)
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + drawn.expovariate(rate))
    return moments


async def run_sweep(endpoint: ChatEndpoint, model: str, sweep: Sweep, advance: Callable[[], None]) -> list[LoadPoint]:
    """Measures each rate in turn. A run starts after the previous run's answers; calls `advance` after each run."""
    for most in ARMS.values():
        await endpoint.ask(model, sweep.prompts[0].question(WARM_UP_TOKENS, most))
    points = []
    for number, rate in enumerate(sweep.rates):
        moments = arrivals(rate, sweep.requests, sweep.seed + number)
        arms = list(ARMS) if number % 2 == 0 else list(reversed(ARMS))
        for arm in arms:
            points.append(await _run(endpoint, model, sweep, arm, rate, moments))
            advance()
    return points


async def _run(
    endpoint: ChatEndpoint, model: str, sweep: Sweep, arm: str, rate: float, moments: Sequence[float]
) -> LoadPoint:
    began = time.perf_counter()

    async def ask(prompt: Prompt, moment: float) -> TimedAnswer | EndpointError:
        await asyncio.sleep(moment - (time.perf_counter() - began))
        try:
            return await endpoint.ask(model, prompt.question(sweep.max_tokens, ARMS[arm]))
        except EndpointError as error:
            return error

    prompts = islice(cycle(sweep.prompts), len(moments))
    outcomes = await asyncio.gather(*(ask(*one) for one in zip(prompts, moments, strict=True)))
    seconds = time.perf_counter() - began
    return load_point(arm, rate, outcomes, seconds)


def load_point(arm: str, load: float, outcomes: Sequence[TimedAnswer | EndpointError], seconds: float) -> LoadPoint:
    """Summarizes a run that took `seconds`. Raises its first failure if no request was answered."""
    answers = [outcome for outcome in outcomes if isinstance(outcome, TimedAnswer)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, EndpointError)]
    if not answers:
        raise failures[0]
    tokens = sum(answer.tokens for answer in answers)
    return LoadPoint(arm, load, tokens / seconds, len(answers), len(failures), Latencies.of(answers))
