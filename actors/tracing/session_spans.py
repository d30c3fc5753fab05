"""One process's spans of sessions: one span per session, below the router's. Slow ones list their rounds as events."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from opentelemetry.trace import Span, SpanKind, Tracer

from actors.tracing.contexts import context_of, traceparent_of
from cluster.tracing.round_events import SessionEvents
from cluster.tracing.session_tracer import Fact
from protos.messages import Close, Finish, Message, Open, Refusal, Verdict

MOST_SESSIONS = 4096  # most sessions traced at once; further ones are not traced
NANO = 1_000_000_000


@dataclass(slots=True)
class _TracedSession:
    span: Span
    by: str  # the peer that opened it
    began_ns: int
    events: SessionEvents = field(default_factory=SessionEvents)


class SessionSpans:
    """Implements `SessionTracer`; `name` is what the process does for a session."""

    def __init__(
        self, tracer: Tracer, name: str, kind: SpanKind, slow_s: float, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._kind = kind
        self._slow_ns = slow_s * NANO
        self._clock_ns = clock_ns
        self._sessions: dict[str, _TracedSession] = {}

    def opened(self, session: str, traceparent: str, by: str = "", **facts: Fact) -> str:
        now = self._clock_ns()
        if (known := self._sessions.get(session)) is not None:
            known.by = by
            known.events.add(now, "opened again", facts)
            return traceparent_of(known.span)
        if not traceparent or len(self._sessions) >= MOST_SESSIONS:
            return ""
        attributes = {"slipstream.session": session, **_named(facts)}
        span = self._tracer.start_span(self._name, context_of(traceparent), self._kind, attributes, start_time=now)
        if not span.is_recording():
            return ""
        self._sessions[session] = _TracedSession(span, by, now)
        return traceparent_of(span)

    def heard(self, peer: str, message: Message) -> None:
        match message:
            case Open():
                facts = {"attempt": message.attempt, "tokens": len(message.tokens)}
                self.opened(message.session, message.traceparent, peer, **facts)
            case Close():
                self.ended(message.session, "closed")
            case _:
                self._note(message)

    def said(self, peer: str, message: Message) -> None:
        traced = self._sessions.get(getattr(message, "session", ""))
        if traced is None or (isinstance(message, Verdict) and peer != traced.by):
            return  # a target also sends drafters the verdicts that its router gets
        self._note(message)
        if isinstance(message, Refusal) and peer == traced.by:
            self.ended(message.session, "refused")

    def marked(self, name: str, sessions: Iterable[str], **facts: Fact) -> None:
        if self._sessions:
            for session in sessions:
                if (traced := self._sessions.get(session)) is not None:
                    traced.events.add(self._clock_ns(), name, facts)

    def ended(self, session: str, why: str) -> None:
        if (traced := self._sessions.pop(session, None)) is None:
            return
        now = self._clock_ns()
        span = traced.span
        span.set_attribute("slipstream.end", why)
        span.set_attributes({f"slipstream.{name}": count for name, count in traced.events.sums.items()})
        if now - traced.began_ns >= self._slow_ns:
            span.set_attribute("slipstream.events_left_out", traced.events.left_out)
            for event in traced.events.latest:
                span.add_event(event.name, _named(event.facts), event.at_ns)
        span.end(now)

    def gone(self, peer: str) -> None:
        for session in [name for name, traced in self._sessions.items() if traced.by == peer]:
            self.ended(session, "stream broke")

    def _note(self, message: Message) -> None:
        session = getattr(message, "session", "")
        if (traced := self._sessions.get(session)) is None:
            return
        traced.events.message(self._clock_ns(), message)
        if isinstance(message, Verdict) and message.finish is not Finish.NONE:
            self.ended(session, message.finish.name.lower())


def _named(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Prefixes the facts' names."""
    return {f"slipstream.{name}": value for name, value in facts.items()}
