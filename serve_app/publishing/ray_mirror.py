"""Mirrors a process's metric families in Ray's metrics: copies the value of each sample every few seconds.

Ray allows no colons in names and adds the prefix `ray_`, so `vllm:x` becomes `ray_vllm_x`. Ray's histograms would
record every observation on the hot path. Prometheus' client is cheaper; the mirror copies its buckets, sums and counts
as gauges, which work in the same queries.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from ray.serve import metrics

PERIOD_S = 5.0  # seconds; Ray itself reports every ten seconds
TOTAL = "_total"  # suffix that Ray adds to the names of counters
CREATED = "_created"  # suffix of creation times, which are not mirrored


def ray_name(name: str) -> str:
    """Returns a sample's name in Ray's metrics, without Ray's prefix."""
    return name.replace(":", "_")


class RayMirror:
    """Mirrors the metrics of the process that creates it, which Serve identifies as a replica."""

    def __init__(
        self,
        collect: Callable[[], Iterable[Metric]],
        counter: Callable[[str, str, tuple[str, ...]], Any] = metrics.Counter,
        gauge: Callable[[str, str, tuple[str, ...]], Any] = metrics.Gauge,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`collect` returns the process's current families."""
        self._collect = collect
        self._counter = counter
        self._gauge = gauge
        self._clock = clock
        self._counters: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._published: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._due = clock()

    def publish(self) -> None:
        """Passes the current values to Ray. Does nothing within PERIOD_S of the previous time."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + PERIOD_S
        for family in self._collect():
            for sample in family.samples:
                if not sample.name.endswith(CREATED):
                    self._publish(family, sample)

    def _publish(self, family: Metric, sample: Sample) -> None:
        if family.type == "counter":
            self._count(ray_name(sample.name.removesuffix(TOTAL)), family.documentation, sample)
            return
        name = ray_name(sample.name)
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = self._gauge(name, family.documentation, tuple(sample.labels))
        gauge.set(sample.value, dict(sample.labels))

    def _count(self, name: str, text: str, sample: Sample) -> None:
        key = (name, frozenset(sample.labels.items()))
        grown = sample.value - self._published.get(key, 0.0)
        if grown <= 0:
            return
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = self._counter(name, text, tuple(sample.labels))
        counter.inc(grown, dict(sample.labels))
        self._published[key] = sample.value
