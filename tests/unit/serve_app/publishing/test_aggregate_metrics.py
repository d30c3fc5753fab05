"""Tests the aggregation of all replicas' metrics in one response."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from serve_app.api.metrics import Metrics
from serve_app.publishing.aggregate_metrics import NAMES, AggregateMetrics, exposition, with_labels


def families(replica: str, count: int) -> list[Metric]:
    registry = CollectorRegistry()
    Counter("slipstream_things", "Things", registry=registry).inc(count)
    return list(with_labels(registry.collect(), {"replica": replica}))


def totals(text: bytes) -> dict[tuple[str, str], float]:
    found = text_string_to_metric_families(text.decode())
    return {
        (sample.name, sample.labels["replica"]): sample.value
        for family in found
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def test_families_of_replicas_are_merged_without_failed_ones() -> None:
    async def routers() -> Sequence[Sequence[Metric]]:
        return [families("a", 1), families("b", 2)]

    async def drafters() -> Sequence[Sequence[Metric]]:
        raise RuntimeError("no replica")

    text = await AggregateMetrics([routers, drafters])()
    assert totals(text) == {("slipstream_things_total", "a"): 1, ("slipstream_things_total", "b"): 2}
    assert text.count(b"# TYPE slipstream_things_total") == 1


def test_vllms_names_have_the_same_values() -> None:
    metrics = Metrics(model="toy")
    metrics.prompt(7)
    text = exposition([metrics.families()]).decode()
    assert 'vllm:prompt_tokens_total{model_name="toy"} 7.0' in text
    assert 'slipstream_prompt_tokens_total{model="toy"} 7.0' in text
    assert 'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="toy"} 0.0' in text


def test_every_aliased_family_exists() -> None:
    assert set(NAMES) <= {family.name for family in Metrics().registry.collect()}
