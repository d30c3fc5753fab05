"""Metrics of a whole deployment in one response, served by any of its routers.

`AggregateMetrics` collects the families of all replicas and merges them. `pack_families` encodes families for transfer
between processes. `VllmNames` repeats families under vLLM's names, for dashboards, autoscalers and load generators made
for vLLM. It copies values at collection, so nothing is measured twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from pydantic import TypeAdapter

from cluster.telemetry import packed, unpacked

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # seconds for other processes to answer; pools with a slower replica are omitted

Families = Sequence[Sequence[Metric]]
"""One deployment's metric families, by replica; each replica adds its own labels."""

Gather = Callable[[], Awaitable[Families]]
"""Collects the families of all replicas of one deployment."""


class AggregateMetrics:
    """Produces the response at `/metrics` for Prometheus.

    Requests that arrive during a collection share the next one, so each response has the values after its request.
    """

    def __init__(self, pools: Iterable[Gather]) -> None:
        self._pools = tuple(pools)
        self._lock = asyncio.Lock()
        self._begun = 0  # number of collections
        self._text = b""
        self._text_of = 0  # number of the collection that made the text

    async def __call__(self) -> bytes:
        known = self._begun
        async with self._lock:
            if self._text_of <= known:
                self._begun += 1
                number = self._begun
                answers = await asyncio.gather(*(_collect_pool(pool) for pool in self._pools))
                self._text = await asyncio.to_thread(exposition, [families for pool in answers for families in pool])
                self._text_of = number
            return self._text


async def _collect_pool(pool: Gather) -> Families:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await pool()
    except Exception as error:  # noqa: BLE001  # whatever failed elsewhere, the other metrics are published
        log.warning("some replicas did not report metrics: %s", error or type(error).__name__)
        return ()


def exposition(replicas: Iterable[Iterable[Metric]]) -> bytes:
    """Renders Prometheus' text format, which requires all samples of a family to be adjacent."""
    registry = CollectorRegistry()
    registry.register(_Merged(replicas))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, replicas: Iterable[Iterable[Metric]]) -> None:
        self._families: dict[str, Metric] = {}
        for families in replicas:
            for family in families:
                merged = self._families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                merged.samples.extend(family.samples)

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]  # name, labels, value


FAMILIES = TypeAdapter(list[_Family])


def pack_families(families: Iterable[Metric]) -> bytes:
    """Encodes and compresses families; repeated names and labels compress well."""
    return packed([_Family(one.name, one.documentation, one.type, _samples(one)) for one in families])


def _samples(family: Metric) -> list[tuple[str, dict[str, str], float]]:
    return [(sample.name, dict(sample.labels), sample.value) for sample in family.samples]


def unpack_families(message: bytes) -> list[Metric]:
    """Decodes the result of `pack_families`. Raises ValueError for invalid messages."""
    return [_metric(family) for family in unpacked(message, FAMILIES)]


def _metric(family: _Family) -> Metric:
    metric = Metric(family.name, family.documentation, family.type)  # raises ValueError for an unknown type
    metric.samples = [Sample(*sample) for sample in family.samples]
    return metric


PREFIX = "vllm:"
MODEL = "model_name"

NAMES: Mapping[str, str] = {
    "slipstream_prompt_tokens": "prompt_tokens",
    "slipstream_completion_tokens": "generation_tokens",
    "slipstream_finished": "request_success",
    "slipstream_request_seconds": "e2e_request_latency_seconds",
    "slipstream_time_to_first_token_seconds": "time_to_first_token_seconds",
    "slipstream_inter_token_seconds": "inter_token_latency_seconds",
    "slipstream_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "slipstream_request_prompt_tokens": "request_prompt_tokens",
    "slipstream_request_completion_tokens": "request_generation_tokens",
    "slipstream_blocks": "spec_decode_num_drafts",
    "slipstream_draft_tokens": "spec_decode_num_draft_tokens",
    "slipstream_accepted_tokens": "spec_decode_num_accepted_tokens",
    "slipstream_accepted_tokens_at": "spec_decode_num_accepted_tokens_per_pos",
}
"""Maps our names of router metrics to vLLM's names."""


class VllmNames(Collector):
    """Repeats router metrics under vLLM's names, with its model label."""

    def __init__(self, source: Collector, model: str, names: Mapping[str, str] = NAMES) -> None:
        self._source = source
        self._model = model
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            if (name := self._names.get(family.name)) is not None:
                yield renamed(family, PREFIX + name, {MODEL: self._model})


def renamed(family: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    """Returns the family under another name, with additional labels."""
    metric = Metric(name, family.documentation, family.type)
    metric.samples = [
        Sample(name + sample.name.removeprefix(family.name), {**sample.labels, **labels}, sample.value)
        for sample in family.samples
    ]
    return metric


def with_labels(families: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Adds labels to all samples of the families."""
    return (renamed(family, family.name, labels) for family in families)
