"""Tests the OpenTelemetry spans of a request in HTTP, router, drafter and target, over real gRPC and OTLP."""

import asyncio
from typing import Any

import httpx
import pytest

from actors.tracing import SessionSpans, TracedService
from cluster.config_sections import TracingConfig
from tests.asgi_front import byte_codec, config_of, http_client, toy_api
from tests.integration.harness import CONTEXT, Cluster, cluster
from tests.otlp_collector import collecting

SERVICES = ("http", "router", "drafter", "target")
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


def attributes(item: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in item.attributes}


async def ask(c: Cluster, http: TracedService, headers: dict[str, str]) -> httpx.Response:
    """Requests a 40-token completion through the in-process API and the cluster's router."""
    api = toy_api(c.router, byte_codec(), config_of({}, CONTEXT), tracer=http.tracer)
    body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    async with http_client(api) as client:
        return await client.post("/v1/completions", json=body, headers=headers)


async def traced(options: TracingConfig, headers: dict[str, str]) -> dict[str, Any]:
    services = {name: TracedService.begun(options, name) for name in SERVICES}
    work = {"router": "route", "drafter": "draft", "target": "verify"}

    def tracer(name: str) -> SessionSpans:
        return services[name].sessions(work[name])

    async with cluster(tracer=tracer, lock_step=True) as c:
        response = await ask(c, services["http"], headers)
        assert response.status_code == 200, response.text
    for service in services.values():
        await asyncio.to_thread(service.close)
    answer: dict[str, Any] = response.json()
    return answer


async def test_one_request_is_one_trace_in_four_services() -> None:
    with collecting() as (endpoint, collector):
        options = TracingConfig(endpoint=endpoint, sample=0.0, slow_s=0.0)
        answer = await traced(options, {"traceparent": f"00-{TRACE}-{CALLER}-01"})
    spans = {service: collector.only(service) for service in SERVICES}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["http"].parent_span_id.hex() == CALLER
    assert spans["router"].parent_span_id == spans["http"].span_id
    assert spans["drafter"].parent_span_id == spans["router"].span_id
    assert spans["target"].parent_span_id == spans["router"].span_id

    recorded = attributes(spans["http"])
    assert spans["http"].name == "text_completion toy"
    assert recorded["gen_ai.operation.name"] == "text_completion"
    assert (recorded["gen_ai.usage.input_tokens"], recorded["gen_ai.usage.output_tokens"]) == (3, 40)
    assert recorded["gen_ai.response.id"] == answer["id"]
    assert recorded["http.response.status_code"] == 200
    details = answer["usage"]["completion_tokens_details"]
    assert recorded["slipstream.accepted_tokens"] == details["accepted_prediction_tokens"]


async def test_a_slow_requests_spans_contain_every_round() -> None:
    with collecting() as (endpoint, collector):
        await traced(TracingConfig(endpoint=endpoint, slow_s=0.0), {})
    target = collector.only("target")
    verdicts = [attributes(event) for event in target.events if event.name == "verdict"]
    assert sum(verdict["slipstream.decided"] for verdict in verdicts) == 40
    assert len(verdicts) == attributes(target)["slipstream.rounds"]
    assert {"verify", "block"} <= {event.name for event in target.events}
    drafter = collector.only("drafter")
    assert {"asked", "draft", "block", "verdict"} <= {event.name for event in drafter.events}
    router = collector.only("router")
    assert "given to" in {event.name for event in router.events}
    for span in (target, drafter, router):
        times = [event.time_unix_nano for event in span.events]
        assert span.start_time_unix_nano <= min(times) <= max(times) <= span.end_time_unix_nano


async def test_a_quick_requests_spans_have_no_rounds() -> None:
    with collecting() as (endpoint, collector):
        await traced(TracingConfig(endpoint=endpoint, slow_s=3600), {})
    assert [len(collector.only(service).events) for service in SERVICES] == [0, 0, 0, 0]
    assert attributes(collector.only("target"))["slipstream.rounds"] > 0


@pytest.mark.parametrize(
    ("sample", "headers"), [(1.0, {"traceparent": f"00-{TRACE}-{CALLER}-00"}), (0.0, {}), (0.0, {"traceparent": "?"})]
)
async def test_unsampled_requests_have_no_spans(sample: float, headers: dict[str, str]) -> None:
    with collecting() as (endpoint, collector):
        await traced(TracingConfig(endpoint=endpoint, sample=sample), headers)
    assert collector.spans == {}
