"""Tests a Ray deployment's observability: metrics of all processes at one router, Ray's metrics port, traces and logs.

Not part of the default suite: `make test-exhaustive`.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from serve_app.status import versions_table
from tests.integration.serving import Served, demo_served
from tests.otlp_collector import Collector, collecting

TRACE = "0af7651916cd43dd8448eb211c80319c"
SERVICES = {"slipstream-http", "slipstream-router", "slipstream-drafter", "slipstream-target"}
SECRET = "Why is the sky blue, Rosebud?"
ANSWERS = 4


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, Collector]]:
    with collecting() as both:
        yield both


@pytest.fixture(scope="module")
def served(collector: tuple[str, Collector]) -> Iterator[Served]:
    """Serves two routers, a target and a drafter, and requests a few answers."""
    tracing = (f"tracing.endpoint={collector[0]}", "tracing.sample=0", "tracing.slow_s=0")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with demo_served(*tracing, "server.routers=2", "server.log_format=json", f"server.admin.port={port}") as endpoint:
        for index in range(ANSWERS):
            traced = {"traceparent": f"00-{TRACE}-{'b' * 16}-01"} if index == 0 else {}
            ask(endpoint, {"X-Request-Id": f"sky-{index}", **traced})
        yield endpoint


@pytest.fixture
def operators(served: Served) -> str:
    """Returns the admin address, shared by both routers."""
    return f"http://127.0.0.1:{served.config.server.admin.port}"


def ask(served: Served, headers: dict[str, str]) -> None:
    body = {
        "model": served.config.model.name,
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "metadata": {"prompt_version": "sky@1"},
    }
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text


def eventually(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.2)


def samples(url: str) -> list[Sample]:
    families = text_string_to_metric_families(httpx.get(url, trust_env=False).text)
    return [sample for family in families for sample in family.samples]


def total(found: list[Sample], name: str, **labels: str) -> float:
    return sum(one.value for one in found if one.name == name and labels.items() <= one.labels.items())


def test_metrics_and_page_are_at_the_operators_address_alone(served: Served, operators: str) -> None:
    for path in ("/metrics", "/", "/page/state"):
        assert httpx.get(f"{served.url}{path}", trust_env=False).status_code == 404
        assert httpx.get(f"{operators}{path}", trust_env=False, timeout=60).status_code == 200
    for url in (served.url, operators):
        assert httpx.get(f"{url}/health", trust_env=False).json()["status"] == "ok"


def test_every_router_serves_the_metrics_of_all_processes(served: Served, operators: str) -> None:
    for _ in range(4):  # reaches both routers
        found = samples(f"{operators}/metrics")
        assert {one.labels["deployment"] for one in found} == {"Router", "Target", "Drafter"}
        assert len({one.labels["replica"] for one in found if one.labels["deployment"] == "Router"}) == 2
        assert total(found, "vllm:generation_tokens_total", model_name=served.config.model.name) == 24 * ANSWERS
        assert total(found, "vllm:request_success_total", finished_reason="length") == ANSWERS
        assert total(found, "vllm:prefix_cache_hits_total") > 0
        assert total(found, "slipstream_target_seconds_total", cause="step") > 0
        assert total(found, "slipstream_prompt_version_requests_total", prompt_version="sky@1") == ANSWERS
    table = versions_table(httpx.get(f"{operators}/metrics", trust_env=False).text)
    assert next(iter(table.columns[1].cells)) == str(ANSWERS)


def test_ray_publishes_them_at_its_own_port(served: Served) -> None:
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def whole() -> bool:
        found = samples(url)
        return (
            total(found, "ray_vllm_generation_tokens_total") == 24 * ANSWERS
            and total(found, "ray_vllm_time_to_first_token_seconds_bucket", le="+Inf") == ANSWERS
            and total(found, "ray_vllm_time_to_first_token_seconds_count") == ANSWERS
            and total(found, "ray_vllm_prefix_cache_queries_total", deployment="Target") > 0
            and total(found, "ray_slipstream_drafting_seconds_total", deployment="Drafter") > 0
        )

    eventually(whole, "Ray has reported all of it", 90)


def test_one_request_is_one_trace_in_four_services(served: Served, collector: tuple[str, Collector]) -> None:
    spans = collector[1].spans
    eventually(lambda: spans.keys() == SERVICES, f"spans of all services have come; there are those of {spans.keys()}")
    assert {span.trace_id.hex() for found in spans.values() for span in found} == {TRACE}
    assert all(len(found) == 1 for found in spans.values()), "the others were not sampled"
    reported: dict[str, Any] = {one.key: one.value for one in collector[1].only("http").attributes}
    assert reported["slipstream.prompt_version"].string_value == "sky@1"
    assert {event.name for event in collector[1].only("target").events} >= {"verify", "verdict"}


def test_each_request_has_a_structured_line_by_its_id_and_no_line_quotes_any(served: Served) -> None:
    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs" / "serve"

    def lines() -> list[str]:
        return [line for file in folder.glob("*.log") for line in file.read_text(errors="replace").splitlines()]

    def ended() -> dict[str, dict[str, Any]]:
        reported = [json.loads(line) for line in lines() if "request ended" in line]
        return {line["request"]: line for line in reported}

    eventually(lambda: len(ended()) >= ANSWERS, "each request has a line")
    for index in range(ANSWERS):
        line = ended()[f"chatcmpl-sky-{index}"]
        assert line["request_id"] == f"sky-{index}", "as in the lines of Serve itself"
        assert (line["endpoint"], line["status"], line["completion_tokens"]) == ("chat", 200, 24)
        assert line["prompt_version"] == "sky@1"
        assert line["sessions"]
    assert not [line for line in lines() if "Rosebud" in line]
