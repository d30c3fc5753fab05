"""Ray receives metric families as increments and current values, under valid names."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serve_app.publishing.ray_mirror import RayMirror
from tests.unit.serve_app.publishing.exported_names import exported

Labels = tuple[tuple[str, str], ...]


class Ray:
    """Fake of the used parts of Ray's metrics."""

    def __init__(self) -> None:
        self.values: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self.kinds: dict[str, str] = {}
        self.now = 0.0

    def made(self, kind: str) -> Callable[[str, str, tuple[str, ...]], "RayMetric"]:
        def make(name: str, _: str, labels: tuple[str, ...]) -> "RayMetric":
            assert ":" not in name
            assert name not in self.kinds, "made twice"
            self.kinds[name] = kind
            return RayMetric(self, name, labels)

        return make


class RayMetric:
    def __init__(self, ray: Ray, name: str, labels: tuple[str, ...]) -> None:
        self._ray = ray
        self._name = name
        self._labels = labels

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses anything else"
        assert tuple(tags) == self._labels
        self._ray.values[self._name, tuple(tags.items())] += value

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self._labels
        self._ray.values[self._name, tuple(tags.items())] = value


def mirrored(registry: CollectorRegistry) -> tuple[Ray, RayMirror]:
    ray = Ray()
    return ray, RayMirror(registry.collect, ray.made("counter"), ray.made("gauge"), lambda: ray.now)


def test_counters_receive_increments_and_gauges_values() -> None:
    registry = CollectorRegistry()
    counter = Counter("things", "Things", ["kind"], registry=registry)
    gauge = Gauge("vllm:level", "Level", registry=registry)
    ray, mirror = mirrored(registry)
    counter.labels("a").inc(3)
    gauge.set(5)
    mirror.publish()
    counter.labels("a").inc(2)
    gauge.set(4)
    ray.now += 60
    mirror.publish()
    assert ray.values == {("things", (("kind", "a"),)): 5, ("vllm_level", ()): 4}
    assert ray.kinds == {"things": "counter", "vllm_level": "gauge"}


def test_histograms_are_mirrored_by_bucket() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("seconds", "Seconds", buckets=(1, 2), registry=registry)
    ray, mirror = mirrored(registry)
    histogram.observe(0.5)
    histogram.observe(1.5)
    mirror.publish()
    buckets = {labels: value for (name, labels), value in ray.values.items() if name == "seconds_bucket"}
    assert buckets == {(("le", "1.0"),): 1, (("le", "2.0"),): 2, (("le", "+Inf"),): 2}
    assert (ray.values["seconds_count", ()], ray.values["seconds_sum", ()]) == (2, 2.0)
    assert set(ray.kinds.values()) == {"gauge"}


def test_frequent_calls_collect_once_per_period() -> None:
    asked: list[float] = []
    ray = Ray()

    def collect() -> list[object]:
        asked.append(ray.now)
        return []

    mirror = RayMirror(collect, ray.made("counter"), ray.made("gauge"), lambda: ray.now)  # type: ignore[arg-type]
    for second in range(60):
        ray.now = float(second)
        mirror.publish()
        mirror.publish()
    assert asked[0] == 0.0
    gaps = {later - earlier for earlier, later in pairwise(asked)}
    assert len(gaps) == 1
    assert 1 < gaps.pop() < 10, "Ray itself reports every ten seconds"


def test_exported_names_are_those_at_rays_port() -> None:
    registry = CollectorRegistry()
    Counter("vllm:things", "Things", ["kind"], registry=registry).labels("a").inc()
    assert exported(registry.collect()) == {"ray_vllm_things_total": {"kind"}}
