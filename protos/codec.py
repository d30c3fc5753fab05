"""Packs domain messages into protobuf frames and unpacks them; `to_pb` and `from_pb` convert the individual messages.

A malformed message is returned as `Malformed`; the other messages of its frame are decoded as usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from protos.draft_tree import DraftTree
from protos.from_pb import FROM_PB, require
from protos.messages import (
    Attach,
    Block,
    Close,
    Detach,
    DraftRequest,
    Frame,
    Hello,
    Leaving,
    Message,
    NoDraft,
    Open,
    Refusal,
    Resync,
    States,
    StatesAck,
    TokenRules,
    TokenScore,
    Verdict,
    Welcome,
)
from protos.to_pb import TO_PB

FrameT = TypeVar("FrameT", bound=ProtoMessage)


@dataclass(frozen=True, slots=True)
class Malformed:
    """Identifies a malformed message by kind, session and attempt, and gives the reason."""

    kind: str
    session: str
    attempt: int  # 0 for messages without an attempt
    why: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """The well-formed and the malformed messages of a received frame."""

    messages: tuple[Message, ...]
    malformed: tuple[Malformed, ...] = ()


# Maps each message type to its frame field. Receivers process fields in order of field number.
_FIELD: dict[type, str] = {
    Hello: "hello",
    Welcome: "welcome",
    Open: "opens",
    Close: "closes",
    Attach: "attaches",
    Block: "blocks",
    NoDraft: "no_drafts",
    Detach: "detaches",
    Verdict: "verdicts",
    States: "states",
    StatesAck: "acks",
    DraftRequest: "draft_requests",
    Resync: "resyncs",
    Refusal: "refusals",
    Leaving: "leaving",
}


def encode(frame_type: type[FrameT], messages: Frame) -> FrameT:
    """Packs messages into one frame; `frame_type` depends on the stream and its direction.

    Raises KeyError if no frame carries the message type, and ValueError if this frame type has no field for it. Both
    errors indicate a bug in the sender.
    """
    fields: dict[str, Any] = {}
    for message in messages:
        name = _FIELD[type(message)]
        value = TO_PB[type(message)](message)
        if name in ("hello", "welcome", "leaving"):
            fields[name] = value
        else:
            fields.setdefault(name, []).append(value)
    return frame_type(**fields)


def encoded_bytes(message: Message) -> int:
    """Returns the approximate encoded size of a message, in bytes."""
    if isinstance(message, Block):
        return 256 + _tree_bytes(message.tree)
    if isinstance(message, States):
        return 256 + len(message.rows)
    size = 256 + 4 * len(getattr(message, "tokens", ()))
    if isinstance(message, Open):
        own = 4 * len(message.stop_ids) + len(message.cache_salt.encode()) + len(message.grammar.encode())
        return size + own + _rules_bytes(message.rules)
    if isinstance(message, Verdict):
        return size + _scores_bytes(message.scores) + _scores_bytes(message.prompt_scores)
    return size


def _rules_bytes(rules: TokenRules) -> int:
    words = sum([4 * len(word) + 2 for word in rules.bad_words])
    return 12 * len(rules.logit_bias) + 4 * len(rules.allowed) + words


def _scores_bytes(scores: Sequence[TokenScore]) -> int:
    return 8 * len(scores) * (1 + len(scores[0].top_ids)) if scores else 0


def _tree_bytes(tree: DraftTree) -> int:
    parents = 0 if tree.is_chain else len(tree)
    sparse = 6 * len(tree) * len(tree.probs.token_ids[0]) if tree.probs else 0
    return 4 * len(tree) + parents + sparse


def decode(frame: ProtoMessage) -> Decoded:
    """Unpacks a frame; returns malformed messages separately and never raises for them."""
    messages: list[Message] = []
    malformed: list[Malformed] = []
    for descriptor, value in frame.ListFields():
        for item in value if descriptor.is_repeated else (value,):
            try:
                require(getattr(item, "session", None) != "", "session is empty")
                messages.append(FROM_PB[type(item)](item))
            except ValueError as error:
                kind = type(item).__name__
                session = getattr(item, "session", "")
                attempt = getattr(item, "attempt", 0)
                malformed.append(Malformed(kind, session, attempt, str(error)))
    return Decoded(tuple(messages), tuple(malformed))
