"""Tracing hooks that processes call; no-ops when tracing is disabled."""

from collections.abc import Iterable
from typing import Protocol

from protos.messages import Message

Fact = str | bool | int | float
"""Attribute of a span or an event: a count, a name or an address, never a token or a text."""


class SessionTracer(Protocol):
    """One process's spans of traced sessions; other sessions are ignored."""

    def opened(self, session: str, traceparent: str, by: str = "", **facts: Fact) -> str:
        """Starts the process's span for the peer `by`; returns the context to pass on, empty if not traced."""
        ...

    def heard(self, peer: str, message: Message) -> None:
        """Records a received message."""
        ...

    def said(self, peer: str, message: Message) -> None:
        """Records a message sent to this peer."""
        ...

    def marked(self, name: str, sessions: Iterable[str], **facts: Fact) -> None:
        """Records an event of these sessions."""
        ...

    def ended(self, session: str, why: str) -> None:
        """Ends the process's span of a session."""
        ...

    def gone(self, peer: str) -> None:
        """Ends everything started for this peer, because its stream broke."""
        ...


class NoTracing:
    """Tracer that does nothing."""

    def opened(self, session: str, traceparent: str, by: str = "", **facts: Fact) -> str:
        return ""

    def heard(self, peer: str, message: Message) -> None:
        return

    def said(self, peer: str, message: Message) -> None:
        return

    def marked(self, name: str, sessions: Iterable[str], **facts: Fact) -> None:
        return

    def ended(self, session: str, why: str) -> None:
        return

    def gone(self, peer: str) -> None:
        return
