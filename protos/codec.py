"""The one translation between domain messages and protobuf frames.

Decoding checks everything that can be checked without knowing a session: sizes that fit together, values in range. What
does not fit is dropped and returned as `Malformed`, so that one bad message costs nobody else anything.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message as ProtoMessage

from protos import speculation_pb2 as pb
from protos.messages import (
    MAX_BLOCK_TOKENS,
    Acceptance,
    Attach,
    Block,
    Close,
    Detach,
    DraftAnswer,
    DraftRequest,
    DraftTree,
    Finish,
    Frame,
    Hello,
    LiveSession,
    Message,
    NoDraft,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Sampling,
    Shape,
    SparseProbs,
    Verdict,
    Welcome,
)

MAX_SPARSE_WIDTH = 1024
MAX_PENALTY = 2  # as in OpenAI's API; beyond it, logits could overflow
FrameT = TypeVar("FrameT", bound=ProtoMessage)


@dataclass(frozen=True, slots=True)
class Malformed:
    """A received message that was refused: of which kind, session and attempt, and why."""

    kind: str
    session: str
    attempt: int  # 0 for kinds that have none
    why: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """A received frame: what was well-formed, and what was not."""

    messages: tuple[Message, ...]
    malformed: tuple[Malformed, ...] = ()


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)


# ---------------------------------------------------------------- arrays


def _int32_bytes(values: Iterable[int]) -> bytes:
    return np.fromiter(values, dtype="<i4").tobytes()


def _int32_tuple(data: bytes, name: str) -> tuple[int, ...]:
    _require(len(data) % 4 == 0, f"{name} has {len(data)} bytes, not a multiple of 4")
    values = np.frombuffer(data, dtype="<i4")
    _require(values.size == 0 or int(values.min()) >= 0, f"{name} holds a negative token id")
    return tuple(values.tolist())


def _sparse_to_pb(probs: SparseProbs) -> pb.SparseProbs:
    return pb.SparseProbs(
        width=len(probs.token_ids[0]) if probs.token_ids else 0,
        token_ids=np.asarray(probs.token_ids, dtype="<u4").tobytes(),
        weights=np.asarray(probs.weights, dtype="<u2").tobytes(),
    )


def _sparse_from_pb(probs: pb.SparseProbs, tokens: tuple[int, ...]) -> SparseProbs:
    width = probs.width
    positions = len(tokens)
    _require(0 < width <= MAX_SPARSE_WIDTH, f"draft_probs.width is {width}, expected 1..{MAX_SPARSE_WIDTH}")
    _require(
        len(probs.token_ids) == 4 * positions * width and len(probs.weights) == 2 * positions * width,
        f"draft_probs do not hold {positions} x {width} entries",
    )
    ids = np.frombuffer(probs.token_ids, dtype="<u4").reshape(positions, width)
    weights = np.frombuffer(probs.weights, dtype="<u2").reshape(positions, width)
    drawn = (ids == np.asarray(tokens)[:, None]) & (weights > 0)
    _require(bool(drawn.any(axis=1).all()), "a draft token has probability zero in its own draft_probs")
    for row, row_weights in zip(ids, weights, strict=True):
        used = row[row_weights > 0]
        _require(np.unique(used).size == used.size, "draft_probs name a token twice")
    return SparseProbs(tuple(map(tuple, ids.tolist())), tuple(map(tuple, weights.tolist())))


# ---------------------------------------------------------------- messages, one pair each


def _hello_to_pb(m: Hello) -> pb.Hello:
    return pb.Hello(
        protocol_version=m.protocol_version,
        peer_id=m.peer_id,
        vocabulary=m.vocabulary,
        target_model=m.target_model,
        live=[pb.LiveSession(session=s.session, attempt=s.attempt) for s in m.live],
    )


def _hello_from_pb(m: pb.Hello) -> Hello:
    _require(bool(m.peer_id), "peer_id is empty")
    live = tuple(LiveSession(s.session, s.attempt) for s in m.live)
    return Hello(m.peer_id, m.vocabulary, m.target_model, live, m.protocol_version)


def _welcome_to_pb(m: Welcome) -> pb.Welcome:
    return pb.Welcome(protocol_version=m.protocol_version, peer_id=m.peer_id)


def _welcome_from_pb(m: pb.Welcome) -> Welcome:
    return Welcome(m.peer_id, m.protocol_version)


def _sampling_from_pb(m: pb.Sampling) -> Sampling:
    values = (m.temperature, m.top_p, m.min_p, m.frequency_penalty, m.presence_penalty)
    _require(all(math.isfinite(v) for v in values), "sampling holds a value that is not finite")
    _require(m.temperature >= 0, f"temperature is {m.temperature}, expected 0 or more")
    _require(0 < m.top_p <= 1, f"top_p is {m.top_p}, expected 0 < top_p <= 1")
    _require(0 <= m.min_p <= 1, f"min_p is {m.min_p}, expected 0..1")
    for name, value in (("frequency_penalty", m.frequency_penalty), ("presence_penalty", m.presence_penalty)):
        _require(abs(value) <= MAX_PENALTY, f"{name} is {value}, expected -{MAX_PENALTY}..{MAX_PENALTY}")
    return Sampling(m.temperature, m.top_k, m.top_p, m.min_p, m.frequency_penalty, m.presence_penalty)


def _open_to_pb(m: Open) -> pb.Open:
    s = m.sampling
    return pb.Open(
        session=m.session,
        attempt=m.attempt,
        tokens=_int32_bytes(m.tokens),
        prompt_len=m.prompt_len,
        max_len=m.max_len,
        stop_ids=_int32_bytes(m.stop_ids),
        sampling=pb.Sampling(
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            frequency_penalty=s.frequency_penalty,
            presence_penalty=s.presence_penalty,
        ),
        seed=m.seed,
        choice=m.choice,
        hash_key=m.hash_key,
        acceptance=pb.Acceptance.Name(m.acceptance),
        max_draft_tokens=m.max_draft_tokens,
        target_address=m.target_address,
    )


def _open_from_pb(m: pb.Open) -> Open:
    tokens = _int32_tuple(m.tokens, "tokens")
    _require(0 < m.prompt_len <= len(tokens), f"prompt_len is {m.prompt_len} of {len(tokens)} tokens")
    _require(m.max_len > len(tokens), f"max_len is {m.max_len}, not beyond the {len(tokens)} tokens")
    _require(
        m.max_draft_tokens <= MAX_BLOCK_TOKENS,
        f"max_draft_tokens is {m.max_draft_tokens}, expected at most {MAX_BLOCK_TOKENS}",
    )
    return Open(
        session=m.session,
        attempt=m.attempt,
        tokens=tokens,
        prompt_len=m.prompt_len,
        max_len=m.max_len,
        stop_ids=_int32_tuple(m.stop_ids, "stop_ids"),
        sampling=_sampling_from_pb(m.sampling),
        seed=m.seed,
        choice=m.choice,
        hash_key=m.hash_key,
        acceptance=Acceptance(m.acceptance),
        max_draft_tokens=m.max_draft_tokens,
        target_address=m.target_address,
    )


def _close_to_pb(m: Close) -> pb.Close:
    return pb.Close(session=m.session, attempt=m.attempt)


def _close_from_pb(m: pb.Close) -> Close:
    return Close(m.session, m.attempt)


def _block_to_pb(m: Block) -> pb.Block:
    return pb.Block(
        session=m.session,
        base_len=m.base_len,
        prefix_hash=m.prefix_hash,
        tokens=_int32_bytes(m.tree.tokens),
        draft_probs=_sparse_to_pb(m.tree.probs) if m.tree.probs is not None else None,
        parents=b"" if m.tree.is_chain else bytes([parent + 1 for parent in m.tree.parents]),
    )


def _block_from_pb(m: pb.Block) -> Block:
    tokens = _int32_tuple(m.tokens, "tokens")
    _require(0 < len(tokens) <= MAX_BLOCK_TOKENS, f"a block of {len(tokens)} tokens, expected 1..{MAX_BLOCK_TOKENS}")
    probs = _sparse_from_pb(m.draft_probs, tokens) if m.HasField("draft_probs") else None
    tree = _tree_from(tokens, m.parents) if m.parents else DraftTree.chain(tokens, probs)
    _require(tree.probs is probs, "a block with parents and draft_probs, expected one of them")
    return Block(m.session, m.base_len, m.prefix_hash, tree)


def _tree_from(tokens: tuple[int, ...], parents: bytes) -> DraftTree:
    _require(len(parents) == len(tokens), f"{len(parents)} parents of {len(tokens)} tokens")
    _require(all(parent <= node for node, parent in enumerate(parents)), "a token comes before its parent")
    children = set(zip(parents, tokens, strict=True))
    _require(len(children) == len(tokens), "two tokens that come after the same one are equal")
    return DraftTree(tokens, tuple([parent - 1 for parent in parents]))


def _attach_to_pb(m: Attach) -> pb.Attach:
    return pb.Attach(session=m.session, have_len=m.have_len, have_hash=m.have_hash)


def _attach_from_pb(m: pb.Attach) -> Attach:
    return Attach(m.session, m.have_len, m.have_hash)


def _detach_to_pb(m: Detach) -> pb.Detach:
    return pb.Detach(session=m.session)


def _detach_from_pb(m: pb.Detach) -> Detach:
    return Detach(m.session)


def _no_draft_to_pb(m: NoDraft) -> pb.NoDraft:
    return pb.NoDraft(session=m.session, base_len=m.base_len, prefix_hash=m.prefix_hash)


def _no_draft_from_pb(m: pb.NoDraft) -> NoDraft:
    return NoDraft(m.session, m.base_len, m.prefix_hash)


def _verdict_to_pb(m: Verdict) -> pb.Verdict:
    return pb.Verdict(
        session=m.session,
        attempt=m.attempt,
        base_len=m.base_len,
        prefix_hash=m.prefix_hash,
        tokens=_int32_bytes(m.tokens),
        accepted=m.accepted,
        drafted=m.drafted,
        finish=pb.Finish.Name(m.finish),
        answer=pb.DraftAnswer.Name(m.answer),
    )


def _verdict_from_pb(m: pb.Verdict) -> Verdict:
    tokens = _int32_tuple(m.tokens, "tokens")
    _require(len(tokens) > 0, "a verdict decides no token")
    _require(
        m.accepted <= m.drafted and m.accepted <= len(tokens),
        f"accepted {m.accepted} of {m.drafted} drafted and {len(tokens)} decided tokens",
    )
    return Verdict(
        session=m.session,
        attempt=m.attempt,
        base_len=m.base_len,
        prefix_hash=m.prefix_hash,
        tokens=tokens,
        accepted=m.accepted,
        drafted=m.drafted,
        finish=Finish(m.finish),
        answer=DraftAnswer(m.answer),
    )


def _draft_request_to_pb(m: DraftRequest) -> pb.DraftRequest:
    return pb.DraftRequest(
        session=m.session,
        attempt=m.attempt,
        base_len=m.base_len,
        prefix_hash=m.prefix_hash,
        max_tokens=m.max_tokens,
        hold_step=m.hold_step,
        least_chance=m.least_chance,
        shape=pb.Shape.Name(m.shape),
    )


def _draft_request_from_pb(m: pb.DraftRequest) -> DraftRequest:
    _require(0.0 <= m.least_chance <= 1.0, f"least_chance is {m.least_chance}, expected 0 to 1")
    return DraftRequest(
        session=m.session,
        attempt=m.attempt,
        base_len=m.base_len,
        prefix_hash=m.prefix_hash,
        max_tokens=min(m.max_tokens, MAX_BLOCK_TOKENS),
        hold_step=m.hold_step,
        least_chance=m.least_chance,
        shape=Shape(m.shape),
    )


def _resync_to_pb(m: Resync) -> pb.Resync:
    return pb.Resync(session=m.session, have_len=m.have_len, have_hash=m.have_hash)


def _resync_from_pb(m: pb.Resync) -> Resync:
    return Resync(m.session, m.have_len, m.have_hash)


def _refusal_to_pb(m: Refusal) -> pb.Refusal:
    reason = pb.RefusalReason.Name(m.reason)
    return pb.Refusal(session=m.session, attempt=m.attempt, reason=reason, message=m.message)


def _refusal_from_pb(m: pb.Refusal) -> Refusal:
    return Refusal(m.session, m.attempt, RefusalReason(m.reason), m.message)


# ---------------------------------------------------------------- frames

_TO_PB: dict[type, Callable[[Any], ProtoMessage]] = {
    Hello: _hello_to_pb,
    Welcome: _welcome_to_pb,
    Open: _open_to_pb,
    Close: _close_to_pb,
    Attach: _attach_to_pb,
    Block: _block_to_pb,
    NoDraft: _no_draft_to_pb,
    Detach: _detach_to_pb,
    Verdict: _verdict_to_pb,
    DraftRequest: _draft_request_to_pb,
    Resync: _resync_to_pb,
    Refusal: _refusal_to_pb,
}
_FROM_PB: dict[type, Callable[[Any], Message]] = {
    pb.Hello: _hello_from_pb,
    pb.Welcome: _welcome_from_pb,
    pb.Open: _open_from_pb,
    pb.Close: _close_from_pb,
    pb.Attach: _attach_from_pb,
    pb.Block: _block_from_pb,
    pb.NoDraft: _no_draft_from_pb,
    pb.Detach: _detach_from_pb,
    pb.Verdict: _verdict_from_pb,
    pb.DraftRequest: _draft_request_from_pb,
    pb.Resync: _resync_from_pb,
    pb.Refusal: _refusal_from_pb,
}
# Where each message sits in a frame. Frames are read in the order of their fields.
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
    DraftRequest: "draft_requests",
    Resync: "resyncs",
    Refusal: "refusals",
}


def encode(frame_type: type[FrameT], messages: Frame) -> FrameT:
    """Packs messages into one frame of the type that this stream and direction carry.

    Raises KeyError for a message that frames never carry, ValueError for one that this frame type has no
    place for: both are faults of the sender's code.
    """
    fields: dict[str, Any] = {}
    for message in messages:
        name = _FIELD[type(message)]
        value = _TO_PB[type(message)](message)
        if name in ("hello", "welcome"):
            fields[name] = value
        else:
            fields.setdefault(name, []).append(value)
    return frame_type(**fields)


def encoded_bytes(message: Message) -> int:
    """About how many bytes a message takes in a frame."""
    tokens = 4 * len(getattr(message, "tokens", ()))
    probs = getattr(message, "draft_probs", None)
    sparse = 6 * len(probs) * len(probs.token_ids[0]) if probs else 0
    return 256 + tokens + sparse


def decode(frame: ProtoMessage) -> Decoded:
    """Unpacks a frame; malformed messages are set aside, never raised."""
    messages: list[Message] = []
    malformed: list[Malformed] = []
    for descriptor, value in frame.ListFields():
        for item in value if descriptor.is_repeated else (value,):
            try:
                _require(getattr(item, "session", None) != "", "session is empty")
                messages.append(_FROM_PB[type(item)](item))
            except ValueError as error:
                kind = type(item).__name__
                session = getattr(item, "session", "")
                attempt = getattr(item, "attempt", 0)
                malformed.append(Malformed(kind, session, attempt, str(error)))
    return Decoded(tuple(messages), tuple(malformed))
