"""A process's families among Ray's metrics: each sample as it stands, every few seconds.

Ray takes no name with a colon, so `vllm:x` is `vllm_x` there, and it puts `ray_` before each name. Its histograms take
one observation after the other, on the path of each; here they are counted by Prometheus' client, which is cheaper, and
what is mirrored are its buckets, sums and counts. To Ray these are gauges, and to a query the same.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from ray.serve import metrics

PERIOD_S = 5.0  # Ray itself reports every ten seconds
TOTAL = "_total"  # which Ray adds to the names of counters by itself
CREATED = "_created"  # of no use to anybody


class RayCounter(Protocol):
    def inc(self, value: float, tags: dict[str, str]) -> None: ...


class RayGauge(Protocol):
    def set(self, value: float, tags: dict[str, str]) -> None: ...


def ray_name(name: str) -> str:
    """What a sample is called when it is given to Ray."""
    return name.replace(":", "_")


def _counter(name: str, text: str, labels: tuple[str, ...]) -> RayCounter:
    made: RayCounter = metrics.Counter(name, text, labels)
    return made


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> RayGauge:
    made: RayGauge = metrics.Gauge(name, text, labels)
    return made


class RayMirror:
    """Of one process. To be made in it, where Serve can tell which replica it is."""

    def __init__(
        self,
        collect: Callable[[], Iterable[Metric]],
        counter: Callable[[str, str, tuple[str, ...]], RayCounter] = _counter,
        gauge: Callable[[str, str, tuple[str, ...]], RayGauge] = _gauge,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`collect` is asked for what there is by now."""
        self._collect = collect
        self._counter = counter
        self._gauge = gauge
        self._clock = clock
        self._counters: dict[str, RayCounter] = {}
        self._gauges: dict[str, RayGauge] = {}
        self._published: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._due = clock()

    def publish(self) -> None:
        """Gives Ray what is so by now; at once again, it does nothing, so it may be called as often as one likes."""
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


def exported(families: Iterable[Metric]) -> Mapping[str, set[str]]:
    """By name at Ray's port, the labels of each sample that a mirror of these families publishes; Serve's are added."""
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            if not sample.name.endswith(CREATED):
                found.setdefault(f"ray_{ray_name(sample.name)}", set()).update(sample.labels)
    return found
