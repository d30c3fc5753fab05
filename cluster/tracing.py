"""Trace events of a session's rounds, bounded in number and free of tokens and text. Pure.

`actors.tracing` adds the events to OpenTelemetry spans.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from protos.messages import Attach, Block, DraftAnswer, DraftRequest, Message, NoDraft, Refusal, Resync, Verdict

Fact = str | bool | int | float
"""Attribute value of a span or event: a count, name or address; never tokens or text."""


MAX_EVENTS = 1024  # number of latest events kept per session; an answer of 1000 tokens takes about 300 rounds


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """A trace event; `at_ns` is in nanoseconds."""

    at_ns: int
    name: str
    facts: Mapping[str, Fact]


def described(message: Message) -> tuple[str, dict[str, Fact]] | None:
    """Returns the event name and attributes of a message, or None if the message is not traced."""
    match message:
        case Verdict():
            return "verdict", {
                "length": message.base_len,
                "decided": len(message.tokens),
                "accepted": message.accepted,
                "drafted": message.drafted,
                "answer": message.answer.name.lower(),
            }
        case Block():
            return "block", {"length": message.base_len, "tokens": message.size}
        case NoDraft():
            return "no draft", {"length": message.base_len}
        case DraftRequest():
            facts: dict[str, Fact] = {"length": message.base_len, "most_tokens": message.max_tokens}
            return "asked", {**facts, "step_is_held": message.hold_step}
        case Attach() | Resync():
            return type(message).__name__.lower(), {"length": message.have_len}
        case Refusal():
            return "refusal", {"reason": message.reason.name.lower()}
    return None


class SessionEvents:
    """The latest events of a session, and totals over all its rounds."""

    def __init__(self, most: int = MAX_EVENTS) -> None:
        self.latest: deque[RoundEvent] = deque(maxlen=most)
        self.left_out = 0
        self.sums: Counter[str] = Counter(rounds=0, decided=0, drafted=0, accepted=0, missed=0)

    def add(self, at_ns: int, name: str, facts: Mapping[str, Fact]) -> None:
        self.left_out += len(self.latest) == self.latest.maxlen
        self.latest.append(RoundEvent(at_ns, name, facts))

    def message(self, at_ns: int, message: Message) -> None:
        """Records a message received or sent for the session."""
        if isinstance(message, Verdict):
            self._count(message)
        if (event := described(message)) is not None:
            self.add(at_ns, *event)

    def _count(self, verdict: Verdict) -> None:
        self.sums["rounds"] += 1
        self.sums["decided"] += len(verdict.tokens)
        self.sums["drafted"] += verdict.drafted
        self.sums["accepted"] += verdict.accepted
        self.sums["missed"] += verdict.answer is DraftAnswer.MISSED
