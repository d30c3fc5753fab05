"""What actors tell whoever traces sessions. Without tracing they tell it to nobody."""

from collections.abc import Iterable
from typing import Protocol

from protos.messages import Message

Fact = str | bool | int | float
"""Of a span or an event: a count, a name, an address; never a token or a text."""


class SessionTracer(Protocol):
    """One process's part in the sessions that are traced; it ignores all others."""

    def opened(self, session: str, traceparent: str, by: str = "", **facts: Fact) -> str:
        """The process begins its part, for the peer `by`. Returns the context to hand on; empty: it is not traced."""
        ...

    def heard(self, peer: str, message: Message) -> None:
        """A message came."""
        ...

    def said(self, peer: str, message: Message) -> None:
        """A message goes out to this peer."""
        ...

    def marked(self, name: str, sessions: Iterable[str], **facts: Fact) -> None:
        """Something happened to these sessions."""
        ...

    def ended(self, session: str, why: str) -> None:
        """The process's part is over."""
        ...

    def gone(self, peer: str) -> None:
        """What was begun for this peer is over: its stream broke."""
        ...


class NoTracing:
    """Nothing is traced."""

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
