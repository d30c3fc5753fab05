"""Encoding of metric families as bytes, to send them from one process to another."""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from pydantic import TypeAdapter

from cluster.compressed_json import packed, unpacked


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]  # name, labels, value


FAMILIES = TypeAdapter(list[_Family])


def pack_families(families: Iterable[Metric]) -> bytes:
    """Encodes families compactly: names and labels repeat, so they compress well."""
    return packed([_Family(one.name, one.documentation, one.type, _samples(one)) for one in families])


def _samples(family: Metric) -> list[tuple[str, dict[str, str], float]]:
    return [(sample.name, dict(sample.labels), sample.value) for sample in family.samples]


def unpack_families(message: bytes) -> list[Metric]:
    """Reverses `pack_families`; raises ValueError for anything else."""
    return [_metric(family) for family in unpacked(message, FAMILIES)]


def _metric(family: _Family) -> Metric:
    made = Metric(family.name, family.documentation, family.type)  # raises ValueError for an unknown type
    made.samples = [Sample(*sample) for sample in family.samples]
    return made
