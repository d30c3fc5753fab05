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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.routing.ledger import CommittedTokens
from serve_app.api.observability import CLIENT_LEFT, ChoiceRecord, PromptVersions, RequestRecord
from serve_app.publishing.aggregate_metrics import VllmNames, exposition

__all__ = ["CLIENT_LEFT", "Metrics", "RequestRecord"]

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


class Metrics:
    """Counters, histograms and gauges of one router."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        recoveries: Counts = dict,
        handovers: Counts = dict,
        model: str = "",
    ) -> None:
        """`recoveries` counts recovery steps by drafter and step, and `handovers` moved sessions by pool and cause."""
        self.registry = registry = CollectorRegistry()
        self._vllm_names = VllmNames(registry, model)
        self._versions = PromptVersions()
        registry.register(self._versions)
        text = "Recovery steps for drafters with poor blocks"
        registry.register(CountsCollector("slipstream_drafter_remedies", text, ("drafter", "remedy"), recoveries))
        text = "Sessions moved to another replica, by the pool they left and the cause (planned or lost)"
        registry.register(CountsCollector("slipstream_handovers", text, ("pool", "cause"), handovers))
        self._clock = clock
        self._requests = Counter(
            "slipstream_requests", "Requests that have ended", ["endpoint", "status"], registry=registry
        )
        self._running = Gauge("slipstream_running_requests", "Requests in progress", registry=registry)
        self._latency = Histogram(
            "slipstream_request_seconds", "Time from request to end of answer", buckets=_SECONDS, registry=registry
        )
        self._first_token = Histogram(
            "slipstream_time_to_first_token_seconds",
            "Time from a session's start to its first committed tokens",
            buckets=_SECONDS,
            registry=registry,
        )
        self._gap = Histogram(
            "slipstream_inter_token_seconds",
            "Time between consecutive verdicts of a session",
            buckets=_GAP_SECONDS,
            registry=registry,
        )
        self._prompt_tokens = Counter("slipstream_prompt_tokens", "Prompt tokens", registry=registry)
        self._completion_tokens = Counter("slipstream_completion_tokens", "Committed tokens", registry=registry)
        self._draft_tokens = Counter("slipstream_draft_tokens", "Draft tokens in verified blocks", registry=registry)
        self._accepted_tokens = Counter("slipstream_accepted_tokens", "Draft tokens accepted", registry=registry)
        self._blocks = Counter("slipstream_blocks", "Blocks verified", registry=registry)
        self._verifies = Counter("slipstream_verifies", "Verdicts committed", registry=registry)
        self._accepted_at = Counter(
            "slipstream_accepted_tokens_at", "Draft tokens accepted, by position", ["position"], registry=registry
        )
        self._positions: list[Counter] = []  # cached children of `_accepted_at`, by position
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
        with self._running.track_inprogress():
            try:
                yield record
            finally:
                self._requests.labels(endpoint, str(record.status)).inc()
                seconds = self._clock() - started
                self._latency.observe(seconds)
                if record.request is not None:
                    self._versions.ended(record, seconds)
                for choice in record.choices:
                    self._choice_ended(choice, seconds)

    def _choice_ended(self, choice: ChoiceRecord, seconds: float) -> None:
        self._finished.labels(choice.finish or ABORTED).inc()
        self._answer_lengths.observe(choice.tokens)
        if choice.first_token_s is not None and choice.tokens > 1:
            self._token_time.observe((seconds - choice.first_token_s) / (choice.tokens - 1))

    def prompt(self, tokens: int) -> None:
        """Counts the prompt tokens of a request."""
        self._prompt_tokens.inc(tokens)
        self._prompt_lengths.observe(tokens)

    def committed(self, emit: CommittedTokens, seconds: float, *, first: bool) -> None:
        """Counts a verdict that arrived `seconds` after the previous verdict, or after the session's start."""
        (self._first_token if first else self._gap).observe(seconds)
        self._completion_tokens.inc(len(emit.tokens))
        self._draft_tokens.inc(emit.drafted)
        self._accepted_tokens.inc(emit.accepted)
        self._blocks.inc(emit.drafted > 0)
        self._verifies.inc()
        for position in range(emit.accepted):
            if position == len(self._positions):
                self._positions.append(self._accepted_at.labels(str(position)))
            self._positions[position].inc()

    def families(self) -> Iterator[Metric]:
        """Returns all metric families; metrics that vLLM also has are repeated under vLLM's names."""
        yield from self.registry.collect()
        yield from self._vllm_names.collect()

    def exposition(self) -> bytes:
        """Returns the families in Prometheus' text format."""
        return exposition([self.families()])
