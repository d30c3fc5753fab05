"""Prometheus metrics of one router.

Acceptance rate (accepted / drafted tokens):

    sum(rate(slipstream_accepted_tokens_total[5m])) / sum(rate(slipstream_draft_tokens_total[5m]))

Acceptance length (tokens committed per verified block, including the target's own):

    1 + sum(rate(slipstream_accepted_tokens_total[5m])) / sum(rate(slipstream_blocks_total[5m]))

Share of verify steps with a drafted block (the rest is non-speculative decoding):

    sum(rate(slipstream_blocks_total[5m])) / sum(rate(slipstream_verifies_total[5m]))

95th percentile of the time to the first token:

    histogram_quantile(0.95, sum by (le) (rate(slipstream_time_to_first_token_seconds_bucket[5m])))
"""

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.routing.ledger import CommittedTokens
from serve_app.api.observability import CLIENT_LEFT, ChoiceRecord, PromptVersions, RequestRecord
from serve_app.publishing.aggregate_metrics import VllmNames, exposition, with_labels

__all__ = ["CLIENT_LEFT", "Metrics", "RequestRecord"]

ANSWERED = (200, CLIENT_LEFT)  # statuses of requests whose latency is observed; refusals would lower the quantiles
ABORTED = "abort"  # vLLM's label for choices that ended without a finish reason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)


Counts = Callable[[], Mapping[tuple[str, str], int]]


class CountsCollector(Collector):
    """Exports counts with two labels at each scrape."""

    def __init__(self, name: str, text: str, labels: tuple[str, str], counts: Counts) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts = counts

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts().items():
            family.add_metric(labels, count)
        yield family


class VerdictTotals(Collector):
    """Totals over verdicts. Plain numbers, because every session counts a verdict in every step."""

    def __init__(self) -> None:
        self._tokens = 0
        self._drafted = 0
        self._accepted: Tally[int] = Tally()  # verdicts with a block, by number of accepted tokens
        self._without_block = 0
        self._gap_s = 0.0  # sum of all gaps
        self._gaps = [0] * (len(_GAP_SECONDS) + 1)  # number of gaps by bucket

    def add(self, verdict: CommittedTokens) -> None:
        self._tokens += len(verdict.tokens)
        if verdict.drafted:
            self._drafted += verdict.drafted
            self._accepted[verdict.accepted] += 1
        else:
            self._without_block += 1

    def add_gap(self, seconds: float) -> None:
        """Counts the time since a session's previous verdict."""
        self._gap_s += seconds
        self._gaps[bisect_left(_GAP_SECONDS, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        accepted = self._accepted.copy()
        tokens = sum(length * count for length, count in accepted.items())
        blocks = accepted.total()
        for name, text, value in (
            ("completion_tokens", "Committed tokens", self._tokens),
            ("draft_tokens", "Draft tokens in verified blocks", self._drafted),
            ("accepted_tokens", "Draft tokens accepted", tokens),
            ("blocks", "Blocks verified", blocks),
            ("verifies", "Verdicts committed", self._without_block + blocks),
        ):
            yield CounterMetricFamily(f"slipstream_{name}", text, value)
        positions = CounterMetricFamily(
            "slipstream_accepted_tokens_at", "Draft tokens accepted, by position", labels=["position"]
        )
        for position in range(max(accepted, default=0)):
            count = sum(count for length, count in accepted.items() if length > position)
            positions.add_metric((str(position),), count)
        yield positions
        bounds = [*[str(float(bound)) for bound in _GAP_SECONDS], "+Inf"]
        yield HistogramMetricFamily(
            "slipstream_inter_token_seconds",
            "Time between consecutive verdicts of a session",
            list(zip(bounds, accumulate(self._gaps), strict=True)),
            self._gap_s,
        )


class Metrics:
    """Counters, histograms and gauges of one model's requests in a router.

    With several models (`by_model`), this object counts only requests that name no served model.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        recoveries: Counts = dict,
        handovers: Counts = dict,
        model: str = "",
        by_model: Mapping[str, "Metrics"] = MappingProxyType({}),
    ) -> None:
        """`recoveries` counts recoveries by drafter and kind, and `handovers` moved sessions by pool and cause.

        `by_model` has the metrics of each of several models.
        """
        self._model = model
        self._by_model = by_model
        self.registry = registry = CollectorRegistry()
        self._vllm_names = VllmNames(registry, model)
        self._versions = PromptVersions()
        registry.register(self._versions)
        text = "Sessions that drafters reopened, and times that a drafter was given up"
        registry.register(CountsCollector("slipstream_drafter_remedies", text, ("drafter", "remedy"), recoveries))
        text = "Sessions moved to another replica, by the pool they left and the cause (planned or lost)"
        registry.register(CountsCollector("slipstream_handovers", text, ("pool", "cause"), handovers))
        self._clock = clock
        self._requests = Counter(
            "slipstream_requests", "Requests that have ended", ["endpoint", "status"], registry=registry
        )
        self._running = Gauge("slipstream_running_requests", "Requests in progress", registry=registry)
        self._latency = Histogram(
            "slipstream_request_seconds",
            "Time from request to end of answer, without refused and failed requests",
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_token = Histogram(
            "slipstream_time_to_first_token_seconds",
            "Time from a session's start to its first committed tokens",
            buckets=_SECONDS,
            registry=registry,
        )
        self._verdicts = VerdictTotals()
        registry.register(self._verdicts)
        self._prompt_tokens = Counter("slipstream_prompt_tokens", "Prompt tokens", registry=registry)
        self._finished = Counter(
            "slipstream_finished", "Finished choices, by reason", ["finished_reason"], registry=registry
        )
        self._token_time = Histogram(
            "slipstream_time_per_output_token_seconds",
            "Mean time per token of a choice after its first token",
            buckets=_GAP_SECONDS,
            registry=registry,
        )
        self._prompt_lengths = Histogram(
            "slipstream_request_prompt_tokens", "Prompt tokens per request", buckets=_TOKENS, registry=registry
        )
        self._answer_lengths = Histogram(
            "slipstream_request_completion_tokens", "Completion tokens per choice", buckets=_TOKENS, registry=registry
        )

    @contextmanager
    def request(self, endpoint: str) -> Iterator[RequestRecord]:
        """Counts the request as running until the block ends, then under the status in its record."""
        record = RequestRecord()
        started = self._clock()
        self._running.inc()
        try:
            yield record
        finally:
            self.of(record.model)._ended(endpoint, record, self._clock() - started)

    def of(self, model: str) -> "Metrics":
        """Returns the metrics of a model's requests."""
        return self._by_model.get(model, self)

    def attribute(self, record: RequestRecord, model: str) -> None:
        """Counts a running request for its model from now on."""
        self._running.dec()
        self.of(model)._running.inc()
        record.model = model

    def _ended(self, endpoint: str, record: RequestRecord, seconds: float) -> None:
        self._running.dec()
        self._requests.labels(endpoint, str(record.status)).inc()
        if record.choices and record.status in ANSWERED:
            self._latency.observe(seconds)
        if record.request is not None:
            self._versions.ended(record, seconds)
        for choice in record.choices:
            self._choice_ended(choice)

    def _choice_ended(self, choice: ChoiceRecord) -> None:
        self._finished.labels(choice.finish or ABORTED).inc()
        self._answer_lengths.observe(choice.tokens)
        if choice.first_token_s is not None and choice.last_token_s is not None and choice.tokens > 1:
            self._token_time.observe((choice.last_token_s - choice.first_token_s) / (choice.tokens - 1))

    def prompt(self, tokens: int) -> None:
        """Counts the prompt tokens of a request."""
        self._prompt_tokens.inc(tokens)
        self._prompt_lengths.observe(tokens)

    def committed(self, verdict: CommittedTokens, seconds: float, *, first: bool) -> None:
        """Counts a verdict that arrived `seconds` after the previous verdict, or after the session's start."""
        if first:
            self._first_token.observe(seconds)
        else:
            self._verdicts.add_gap(seconds)
        self._verdicts.add(verdict)

    def families(self) -> Iterator[Metric]:
        """Returns all metric families by model; metrics that vLLM also has are repeated under vLLM's names."""
        yield from with_labels(self.registry.collect(), {"model": self._model} if self._model else {})
        if not self._by_model:
            yield from self._vllm_names.collect()
        for one in self._by_model.values():
            yield from one.families()

    def exposition(self) -> bytes:
        """Returns the families in Prometheus' text format."""
        return exposition([self.families()])
