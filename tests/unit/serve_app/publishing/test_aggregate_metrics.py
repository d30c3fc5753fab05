"""Tests the aggregation of all replicas' metrics in one response."""

import asyncio
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


async def test_requests_during_a_collection_share_the_next_one() -> None:
    collections = 0

    async def routers() -> Sequence[Sequence[Metric]]:
        nonlocal collections
        collections += 1
        await asyncio.sleep(0)
        return [families("a", collections)]

    metrics = AggregateMetrics([routers])
    texts = await asyncio.gather(*(metrics() for _ in range(50)))
    assert collections == 2
    assert all(text is texts[1] for text in texts[1:])
    assert totals(await metrics()) == {("slipstream_things_total", "a"): 3}


async def test_values_are_newer_than_their_request_also_after_a_cancelled_one() -> None:
    value = 0
    reading = asyncio.Event()

    async def routers() -> Sequence[Sequence[Metric]]:
        read = value
        reading.set()
        await asyncio.sleep(0.01)
        return [families("a", read)]

    metrics = AggregateMetrics([routers])
    first = asyncio.create_task(metrics())
    await reading.wait()
    value = 5
    second = asyncio.create_task(metrics())
    third = asyncio.create_task(metrics())
    assert totals(await first) == {("slipstream_things_total", "a"): 0}
    reading.clear()
    await reading.wait()
    second.cancel()
    assert totals(await third) == {("slipstream_things_total", "a"): 5}


def test_vllms_names_have_the_same_values() -> None:
    metrics = Metrics(model="toy")
    metrics.prompt(7)
    text = exposition([metrics.families()]).decode()
    assert 'vllm:prompt_tokens_total{model_name="toy"} 7.0' in text
    assert 'slipstream_prompt_tokens_total{model="toy"} 7.0' in text
    assert 'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="toy"} 0.0' in text


def test_every_aliased_family_exists() -> None:
    assert set(NAMES) <= {family.name for family in Metrics().registry.collect()}
