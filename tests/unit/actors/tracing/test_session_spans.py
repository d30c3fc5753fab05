"""Session spans begin with an Open, end with the session, and record events of slow sessions."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from actors.tracing import NO_TRACING, ServiceTracing, SessionSpans
from cluster.config_sections import TracingConfig
from cluster.tracing import SessionEvents
from protos.messages import Close, DraftAnswer, Finish, Message, Refusal, RefusalReason, Verdict
from tests.unit.cluster.samples import a_block, an_open

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
NANO = 1_000_000_000
UNSAMPLED = f"00-{'ab' * 16}-{'cd' * 8}-00"


class Traced:
    """Spans under a stopped clock, with ended spans."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.now_ns = NANO
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        tracer = provider.get_tracer("test")
        self.spans = SessionSpans(tracer, "verify", SpanKind.SERVER, slow_s, lambda: self.now_ns)

    def opened(self, session: str = "s", traceparent: str = PARENT, peer: str = "router#1") -> None:
        self.spans.on_received(peer, an_open(session, traceparent=traceparent))

    @property
    def ended(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    @property
    def only(self) -> ReadableSpan:
        (span,) = self.ended
        return span


def a_verdict(length: int, finish: Finish = Finish.NONE, answer: DraftAnswer = DraftAnswer.GIVEN) -> Verdict:
    return Verdict("s", 1, length, 0, (7, 8), 1, 3, finish, answer)


def test_a_span_is_below_the_routers_and_has_the_sums_of_its_rounds() -> None:
    traced = Traced()
    traced.opened()
    traced.spans.on_sent("router#1", a_verdict(3))
    traced.spans.on_sent("drafter#1", a_verdict(3))  # repeated
    traced.spans.on_sent("router#1", a_verdict(5, answer=DraftAnswer.MISSED))
    assert not traced.ended
    traced.spans.on_sent("router#1", a_verdict(7, Finish.LENGTH))
    span = traced.only
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == ("ab" * 16, "cd" * 8)
    span_facts = dict(span.attributes or {})
    assert span_facts["slipstream.end"] == "length"
    sums = {name: span_facts[f"slipstream.{name}"] for name in ("rounds", "decided", "drafted", "accepted", "missed")}
    assert sums == {"rounds": 3, "decided": 6, "drafted": 9, "accepted": 3, "missed": 1}


@pytest.mark.parametrize(("took_s", "names"), [(1, []), (2, ["block", "verify"])])
def test_only_a_slow_session_has_events(took_s: int, names: list[str]) -> None:
    traced = Traced(slow_s=2)
    traced.opened()
    traced.spans.on_received("drafter#1", a_block((1, 2, 3), (4, 5)))
    traced.now_ns += took_s * NANO
    traced.spans.marked("verify", ["s", "another"], rows=2)
    traced.spans.on_received("router#1", Close("s", 1))
    assert [event.name for event in traced.only.events] == names
    if names:
        block, verify = traced.only.events
        assert dict(block.attributes or {}) == {"slipstream.length": 3, "slipstream.tokens": 2}
        assert dict(verify.attributes or {}) == {"slipstream.rows": 2}
        assert verify.timestamp - block.timestamp == took_s * NANO


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED])
def test_unsampled_sessions_have_no_spans(traceparent: str) -> None:
    traced = Traced()
    traced.opened(traceparent=traceparent)
    traced.spans.on_sent("router#1", a_verdict(3, Finish.STOP))
    assert not traced.ended


@pytest.mark.parametrize(
    ("message", "end"),
    [(Refusal("s", 1, RefusalReason.OVERLOADED, "full"), "refused"), (a_verdict(3, Finish.STOP), "stop")],
)
def test_a_refusal_or_a_last_verdict_ends_a_session(message: Message, end: str) -> None:
    traced = Traced()
    traced.opened()
    traced.spans.on_sent("router#1", message)
    assert (traced.only.attributes or {})["slipstream.end"] == end


def test_the_last_round_counts_even_if_the_drafter_gets_a_longer_verdict_first() -> None:
    traced = Traced()
    traced.opened()
    traced.spans.on_sent("router#1", a_verdict(3))
    traced.spans.on_sent("drafter#1", Verdict("s", 1, 3, 0, (7, 8, 7, 8), 0, 0, Finish.LENGTH))
    traced.spans.on_sent("router#1", a_verdict(5, Finish.LENGTH))
    span_facts = dict(traced.only.attributes or {})
    assert (span_facts["slipstream.rounds"], span_facts["slipstream.decided"]) == (2, 4)


def test_a_session_continues_after_another_peers_refusal() -> None:
    traced = Traced()
    traced.opened()
    traced.spans.on_received("drafter#1", Refusal("s", 1, RefusalReason.OVERLOADED, "full"))
    traced.spans.on_sent("drafter#1", Refusal("s", 1, RefusalReason.OVERLOADED, "full"))
    assert not traced.ended


def test_a_broken_stream_ends_the_spans_of_its_sessions() -> None:
    traced = Traced()
    traced.opened("s", peer="router#1")
    traced.opened("t", peer="router#2")
    traced.opened("s", peer="router#3")  # the router reconnected
    traced.spans.gone("router#1")
    assert not traced.ended
    traced.spans.gone("router#2")
    assert [(span.attributes or {})["slipstream.session"] for span in traced.ended] == ["t"]


def test_only_so_many_sessions_are_traced_at_once() -> None:
    traced = Traced()
    most = next(index for index in range(1 << 20) if not traced.spans.opened(f"s{index}", PARENT))
    assert most > 100
    traced.spans.on_sent("", replace(a_verdict(3, Finish.STOP), session="s0"))
    assert traced.spans.opened("one more", PARENT)
    assert not traced.spans.opened("another", PARENT)


def test_the_latest_events_stay_and_dropped_ones_are_counted() -> None:
    events = SessionEvents(most=2)
    for name in ("a", "b", "c"):
        events.add(0, name, {})
    assert ([event.name for event in events.latest], events.left_out) == (["b", "c"], 1)


def test_without_an_endpoint_nothing_is_traced() -> None:
    tracing = ServiceTracing(TracingConfig(), "target")
    assert tracing.service is None
    tracer = tracing.sessions("verify")
    assert tracer is NO_TRACING
    assert tracer.opened("s", PARENT) == ""
