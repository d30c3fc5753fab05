"""Tests the encoding of metric families between processes."""

import pickle
import zlib

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import CollectorRegistry

from cluster.telemetry import packed
from serve_app.api.metrics import Metrics
from serve_app.publishing.aggregate_metrics import exposition, pack_families, unpack_families, with_labels
from serve_app.publishing.gauges import drafter_levels


def some_families() -> list[Metric]:
    """Returns counters, gauges and histograms with Slipstream's and vLLM's names."""
    metrics = Metrics(model="toy")
    metrics.prompt(7)
    families = [*metrics.families(), *drafter_levels({"sessions": float("inf")}, {"ahead": 0.1})]
    return list(with_labels(families, {"replica": 'a "b" \\ c'}))


def test_packed_families_round_trip() -> None:
    sent = some_families()
    assert {family.type for family in sent} >= {"counter", "gauge", "histogram"}
    arrived = unpack_families(pack_families(sent))
    assert arrived == sent
    assert exposition([arrived]) == exposition([sent])


def test_packed_families_are_small() -> None:
    """The text format would be many times as large."""
    assert len(pack_families(some_families())) * 5 < len(exposition([some_families()]))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        pickle.dumps(some_families()),
        zlib.compress(pickle.dumps(some_families())),
        generate_latest(CollectorRegistry()),
        packed([{"name": "a", "documentation": "", "type": "of no kind", "samples": []}]),
        packed([{"name": "a", "documentation": "", "type": "gauge", "samples": [["a", {"label": 1}, 1.0]]}]),
    ],
    ids=["nothing", "a pickle", "a pickle, compressed", "text", "an unknown type", "a label that is no text"],
)
def test_other_bytes_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"packed data|_Family|metric type"):
        unpack_families(message)
