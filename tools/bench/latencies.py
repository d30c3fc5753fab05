"""Statistics over requests: client-side latencies, acceptance, throughput and paired speed-up. Pure.

TTFT: seconds from the request to the first text. TPOT: mean seconds per token after the first text, per answer. ITL:
seconds between stream events with text, over all answers. With speculation, an event may contain several tokens.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from serve_app.endpoint_client import Tally, TimedAnswer


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of a duration, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Quantiles | None":
        """Returns the quantiles, or None if there are no values."""
        found = list(seconds)
        return cls(*map(float, np.quantile(found, [0.5, 0.9, 0.99]))) if found else None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of several answers; a measure is None if all answers are too short for it."""

    ttft: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None

    @classmethod
    def of(cls, answers: Sequence[TimedAnswer]) -> "Latencies":
        return cls(
            ttft=Quantiles.of(answer.first_token_s for answer in answers),
            tpot=Quantiles.of(
                (answer.latency_s - answer.first_token_s) / (answer.tokens - 1)
                for answer in answers
                if answer.tokens > 1
            ),
            itl=Quantiles.of(gap for answer in answers for gap in answer.gaps_s),
        )


MEASURES = tuple(field.name for field in fields(Latencies))
QUANTILES = tuple(field.name for field in fields(Quantiles))


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Results of one arm under one load."""

    arm: str
    load: float  # requests per second, or number of concurrent requests
    tokens_per_s: float
    answers: int
    failed: int
    latencies: Latencies

    def quantile_s(self, measure: str, quantile: str) -> float | None:
        """Returns one quantile in seconds, for instance measure "ttft" at "p99"."""
        found: Quantiles | None = getattr(self.latencies, measure)
        return None if found is None else float(getattr(found, quantile))


RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Batch:
    """Results of concurrent requests under one arm of the experiment."""

    arm: str
    concurrency: int
    index: int  # index of the prompts' batch
    repeat: int
    seconds: float
    tally: Tally
    kinds: tuple[str, ...]
    answers: tuple[TimedAnswer, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """Results of one arm at one concurrency."""

    arm: str
    concurrency: int
    tokens_per_s: float
    first_token_s: float  # median over all answers
    latency_s: float  # median over answers
    tally: Tally


@dataclass(frozen=True, slots=True)
class Speedup:
    """Throughput of an arm relative to `base`: geometric mean of paired ratios, with its confidence interval."""

    arm: str
    base: str
    concurrency: int
    mean: float
    low: float
    high: float
    equal: int  # number of answers with the same text under both arms
    answers: int


def arm_summary(batches: Sequence[Batch]) -> ArmSummary:
    """Summarizes batches of one arm at one concurrency."""
    answers = [answer for batch in batches for answer in batch.answers]
    return ArmSummary(
        arm=batches[0].arm,
        concurrency=batches[0].concurrency,
        tokens_per_s=sum(answer.tokens for answer in answers) / sum(batch.seconds for batch in batches),
        first_token_s=statistics.median(answer.first_token_s for answer in answers),
        latency_s=statistics.median(answer.latency_s for answer in answers),
        tally=sum((batch.tally for batch in batches), Tally()),
    )


def speedup(batches: Sequence[Batch], base_batches: Sequence[Batch]) -> Speedup:
    """Compares two arms with the same prompts and repeats."""
    base_of = {(batch.index, batch.repeat): batch for batch in base_batches}
    pairs = [(batch, base_of[batch.index, batch.repeat]) for batch in batches]
    ratios: dict[int, list[float]] = {}
    for batch, base in pairs:
        ratios.setdefault(batch.index, []).append(batch.tokens_per_s / base.tokens_per_s)
    # Average repeats of the same prompts into one ratio, since they are not independent.
    mean, low, high = mean_ratio([statistics.geometric_mean(repeats) for repeats in ratios.values()])
    same = [
        answer.text == base_answer.text
        for batch, base in pairs
        for answer, base_answer in zip(batch.answers, base.answers, strict=True)
    ]
    first = batches[0]
    base_first = base_batches[0]
    return Speedup(first.arm, base_first.arm, first.concurrency, mean, low, high, sum(same), len(same))


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Returns the geometric mean of at least two ratios, and its 95 % interval (percentile bootstrap of log-ratios)."""
    assert len(ratios) >= 2, "an interval needs at least two ratios"
    logs = np.log(np.asarray(ratios))
    means = np.random.default_rng(0).choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def acceptance_by_kind(batches: Iterable[Batch]) -> dict[str, Tally]:
    """Sums committed, drafted and accepted tokens by kind of prompt; block counts per request are unknown."""
    tallies: dict[str, Tally] = {}
    for batch in batches:
        for kind, answer in zip(batch.kinds, batch.answers, strict=True):
            tally = Tally(answer.tokens, answer.accepted + answer.rejected, answer.accepted)
            tallies[kind] = tallies.get(kind, Tally()) + tally
    return tallies
