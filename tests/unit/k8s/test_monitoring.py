"""Alerts and the dashboard query only published metrics, with existing labels."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import ray

from actors.learning.trainer import TrainerStatus
from cluster.learning import Figures
from cluster.routing.ledger import CommittedTokens
from cluster.verification.scheduler import TargetActivity
from serve_app.api.fields import RequestBounds, parse
from serve_app.api.metrics import Metrics
from serve_app.api.replies import FinishReason
from serve_app.api.request_schemas import ChatRequest
from serve_app.publishing.gauges import drafter_levels, router_levels, target_levels, trainer_levels, version_levels
from serve_app.replica_counters import CAUSE_LABEL, HELP, LABELS
from serve_app.router import RouterActivity
from tests.unit.k8s.overlays import K8S, ROOT, Json, dashboard, errors, load
from tests.unit.k8s.schemas import SCHEMAS
from tests.unit.serve_app.publishing.exported_names import exported

FIGURES = Figures(sessions=20, agreement=0.5, tokens_per_verify=2.0)
TRAINED = TrainerStatus("waiting", 1, 1, 1, None, {"promoted": 1}, 60.0, FIGURES, FIGURES)
MONITORING = K8S / "components" / "monitoring"
SERVE_LABELS = {"deployment", "replica", "application"}  # added by Serve to a replica's metrics
TARGET_LABELS = {"ray_io_cluster", "ray_io_group", "pod", "namespace"}  # added by Prometheus to scraped metrics
ADDED = {"le"}  # by histograms
EARLIER_NAMES = {"ray_slipstream_plain_tokens_per_second"}  # published for dashboards of earlier development versions


def alerts() -> list[Json]:
    (manifest,) = load(MONITORING / "prometheus-rule.yaml")
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Yields every PromQL expression of alerts and dashboard with its place; Grafana's variables are replaced."""
    for alert in alerts():
        yield alert["alert"], alert["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")


def published() -> dict[str, set[str]]:
    """Returns the labels of every metric of Slipstream's processes, by its name in Prometheus."""
    found = {f"ray_{family}_total": {*LABELS.get(family, CAUSE_LABEL)} | SERVE_LABELS for family in HELP}
    metrics = Metrics(
        recoveries=lambda: {("drafter", "non_speculative"): 1}, handovers=lambda: {("target", "planned"): 1}
    )
    metrics.committed(CommittedTokens((1, 2), 1, 2), 0.1, first=True)
    with metrics.request("chat") as record:
        record.status = 200
        record.request = parse(ChatRequest, json.dumps(CHAT).encode(), RequestBounds())
        record.choices = [Choice()]
    families = [
        *metrics.families(),
        *router_levels(RouterActivity(1, {"drafter": True}), "toy"),
        *target_levels(TargetActivity(1, 1, 0.5, 1.0, 1.0, True, {4: 1}, 1, 1.0, 1, 1), 1, "toy"),
        *drafter_levels({"sessions": 1.0}, {"asked": 1.0}),
        *version_levels({"version": 1, "acceptance": 0.5}),
        *trainer_levels(TRAINED),
    ]
    for name, labels in exported(families).items():
        found[relabelled(name)] = labels | SERVE_LABELS
    return found


def relabelled(name: str) -> str:
    """Returns a metric's name after the relabelling of the PodMonitor."""
    (manifest,) = load(MONITORING / "pod-monitor.yaml")
    (rule,) = manifest["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    assert (rule["sourceLabels"], rule["targetLabel"]) == (["__name__"], "__name__")
    return re.sub(f"^{rule['regex']}$", rule["replacement"].replace("$", "\\"), name)


def selected(expression: Any) -> Iterator[Any]:
    """Yields every vector selector of an expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "args"):
        inner = getattr(expression, name, None) or []
        for each in inner if isinstance(inner, list) else [inner]:
            yield from selected(each)


def serve_metrics() -> set[str]:
    """Returns the names of Ray Serve's own metrics, read from its source."""
    source = Path(ray.__file__).parent / "serve" / "_private"
    return {f"ray_{name}" for path in source.glob("*.py") for name in re.findall(r'"(serve_\w+)"', path.read_text())}


@dataclass
class Choice:
    """Finished choice of an answer."""

    tokens: int = 2
    accepted: int = 1
    rejected: int = 1
    finish: FinishReason | None = "stop"
    first_token_s: float | None = 0.1
    last_token_s: float | None = 0.1


CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "metadata": {"prompt_version": "v1"}}
HISTOGRAM = ("_bucket", "_sum", "_count")


def base(name: str) -> str:
    """Returns a histogram's name without the suffixes of its samples."""
    return next((name.removesuffix(end) for end in HISTOGRAM if name.endswith(end)), name)


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    return {name: set(SERVE_LABELS) for name in serve_metrics()} | published()


def test_alerts_and_queries_exist() -> None:
    assert len(alerts()) >= 5
    assert len(list(queries())) > 30


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_every_queried_metric_is_published(place: str, query: str, known: dict[str, set[str]]) -> None:
    vectors = list(selected(promql_parser.parse(query)))
    assert vectors
    for vector in vectors:
        assert vector.name in known, place
        asked = {matcher.name for matcher in vector.matchers.matchers}
        assert asked <= known[vector.name] | TARGET_LABELS, f"{place}: {vector.name} has no such label"


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_grouping_labels_exist(place: str, query: str, known: dict[str, set[str]]) -> None:
    names = {vector.name for vector in selected(promql_parser.parse(query))}
    by = {label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(",")}
    assert by <= set.intersection(*(known[name] for name in names)) | TARGET_LABELS | ADDED, place


def test_a_misspelt_metric_is_detected(known: dict[str, set[str]]) -> None:
    (vector,) = selected(promql_parser.parse("sum(rate(ray_slipstream_guess_total[5m]))"))
    assert vector.name not in known


def test_every_replica_metric_is_on_the_dashboard() -> None:
    text = "\n".join(query for _, query in queries())
    assert [
        name for name in published().keys() - EARLIER_NAMES if name.startswith("ray_") and base(name) not in text
    ] == []


def test_vllms_metrics_regain_their_names() -> None:
    names = published()
    assert not [name for name in names if name.startswith("ray_vllm")]
    assert {base(name).removesuffix("_total") for name in names if name.startswith("vllm:")} == VLLM


VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:e2e_request_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
}
"""Names as vLLM documents them; counters add `_total`."""


NAMED = re.compile(r"\b(?:ray_slipstream_|slipstream_|vllm:)[a-z_]+_(?:total|seconds|bucket|sum|count)\b")


@pytest.mark.parametrize("page", sorted([*(ROOT / "docs").glob("*.md"), K8S / "README.md"]), ids=lambda page: page.name)
def test_every_documented_metric_is_published(page: Path) -> None:
    names = published()
    known = {name.removeprefix("ray_") for name in [*names, *map(base, names)]}
    named = {name.removeprefix("ray_") for name in NAMED.findall(page.read_text())}
    assert {name for name in named if name not in known and f"{name}_total" not in known} == set()


def test_a_misspelt_metric_in_the_docs_is_detected() -> None:
    assert NAMED.findall("ask for `ray_slipstream_guess_total`, or `vllm:guess_total`") == [
        "ray_slipstream_guess_total",
        "vllm:guess_total",
    ]


@pytest.mark.parametrize("file", ["pod-monitor.yaml", "prometheus-rule.yaml"])
def test_prometheus_operator_objects_are_valid(file: str) -> None:
    for manifest in load(MONITORING / file):
        assert errors(SCHEMAS[manifest["kind"]], manifest) == []


def test_a_misspelt_key_of_an_operator_object_is_refused() -> None:
    for file in ("pod-monitor.yaml", "prometheus-rule.yaml"):
        for manifest in load(MONITORING / file):
            manifest["spec"]["selectr"] = {}
            assert len(errors(SCHEMAS[manifest["kind"]], manifest)) == 1


def test_alerts_have_unique_names_and_explanations() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    page = (K8S / "README.md").read_text()
    assert re.findall(r"^\| `(Slipstream\w+)` \|", page, re.MULTILINE) == names


@pytest.mark.parametrize(
    ("alert", "asked"),
    [
        ("SlipstreamPeersLost", {("ray_slipstream_handovers_total", ("cause", "lost"))}),
        ("SlipstreamBreakerOpen", {("ray_slipstream_breaker_open", None)}),
    ],
)
def test_lost_and_unused_replicas_raise_alerts(alert: str, asked: Any) -> None:
    (rule,) = [rule for rule in alerts() if rule["alert"] == alert]
    found = {
        (vector.name, next(((matcher.name, matcher.value) for matcher in vector.matchers.matchers), None))
        for vector in selected(promql_parser.parse(rule["expr"]))
    }
    assert found == asked


def test_the_metrics_documentation_names_every_replica_counter() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    assert [name for name in published() if name.startswith("ray_") and f"`{base(name)}`" not in page] == []
    assert [name for name in VLLM if f"`{name}`" not in page] == []


def test_panels_show_something_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["type"] == "row" or panel["targets"] for panel in panels)
