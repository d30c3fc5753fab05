"""Converts protobuf messages to domain messages; raises ValueError for malformed input.

Checks sizes and value ranges; checks that depend on session state are left to the receiver. In columns, a malformed row
does not affect the others.
"""

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np

from protos import speculation_pb2 as pb
from protos.draft_tree import MAX_BLOCK_TOKENS, DraftTree, SparseProbs
from protos.messages import (
    MAX_GRAMMAR_BYTES,
    MAX_STATES_WIDTH,
    MAX_TOP,
    NO_RULES,
    NO_SCORING,
    PROOF_BYTES,
    Acceptance,
    AssignmentToken,
    Attach,
    Block,
    Close,
    Collapse,
    Detach,
    DraftAnswer,
    DraftRequest,
    Finish,
    Hello,
    Leaving,
    LiveSession,
    Message,
    NoDraft,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Sampling,
    Scoring,
    Shape,
    StateDtype,
    States,
    StatesAck,
    StatesFormat,
    TokenRules,
    TokenScore,
    Verdict,
    Welcome,
)

MAX_PENALTY = 2  # limit of OpenAI's API; larger values could overflow logits
REPETITION_PENALTIES = (0.01, 100.0)  # lower and upper bound; other values could overflow logits
MAX_BIAS = 100  # limit of OpenAI's API
MAX_SALT_CHARS = 256
MAX_SPARSE_WIDTH = 1024
MAX_KEY_BYTES = 64  # maximum key length of blake2b
_TRACEPARENT = re.compile("00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)


def _same_fields(kind: type[Message]) -> Callable[[Any], Message]:
    """Returns a converter for a message type with identical fields in both forms, at least two."""
    values = attrgetter(*[field.name for field in fields(kind)])
    return lambda m: kind(*values(m))


def _int32_tuple(data: bytes, name: str) -> tuple[int, ...]:
    count, rest = divmod(len(data), 4)
    if rest:
        raise ValueError(f"{name} has {len(data)} bytes, not a multiple of 4")
    values: tuple[int, ...] = struct.unpack(f"<{count}i", data)
    if min(values, default=0) < 0:
        raise ValueError(f"{name} contains a negative token id")
    return values


def _sparse_from_pb(probs: pb.SparseProbs, tokens: tuple[int, ...]) -> SparseProbs:
    width = probs.width
    positions = len(tokens)
    require(0 < width <= MAX_SPARSE_WIDTH, f"draft_probs.width is {width}, expected 1..{MAX_SPARSE_WIDTH}")
    require(
        len(probs.token_ids) == 4 * positions * width and len(probs.weights) == 2 * positions * width,
        f"draft_probs must have {positions} x {width} entries",
    )
    ids = np.frombuffer(probs.token_ids, dtype="<u4").reshape(positions, width)
    weights = np.frombuffer(probs.weights, dtype="<u2").reshape(positions, width)
    drawn = (ids == np.asarray(tokens)[:, None]) & (weights > 0)
    require(
        bool(drawn.any(axis=1).all()),
        "draft_probs give a draft token probability zero; each draft token needs a positive weight",
    )
    used = np.sort(np.where(weights > 0, ids, -1 - np.arange(width)), axis=1)  # padding becomes distinct
    require(bool((used[:, 1:] != used[:, :-1]).all()), "draft_probs list a token twice; token ids must be distinct")
    return SparseProbs(tuple(map(tuple, ids.tolist())), tuple(map(tuple, weights.tolist())))


def _hello_from_pb(m: pb.Hello) -> Hello:
    require(bool(m.peer_id), "peer_id is empty")
    live = tuple(LiveSession(s.session, s.attempt) for s in m.live)
    return Hello(m.peer_id, m.vocabulary, m.target_model, live, m.protocol_version)


def _sampling_from_pb(m: pb.Sampling) -> Sampling:
    values = (m.temperature, m.top_p, m.min_p, m.frequency_penalty, m.presence_penalty)
    require(all(math.isfinite(v) for v in values), "sampling has a non-finite value; use finite numbers")
    require(m.temperature >= 0, f"temperature is {m.temperature}, expected 0 or more")
    require(0 < m.top_p <= 1, f"top_p is {m.top_p}, expected 0 < top_p <= 1")
    require(0 <= m.min_p <= 1, f"min_p is {m.min_p}, expected 0..1")
    for name, value in (("frequency_penalty", m.frequency_penalty), ("presence_penalty", m.presence_penalty)):
        require(abs(value) <= MAX_PENALTY, f"{name} is {value}, expected -{MAX_PENALTY}..{MAX_PENALTY}")
    least, most = REPETITION_PENALTIES
    repetition = m.repetition_penalty
    require(least <= repetition <= most, f"repetition_penalty is {repetition}, expected {least} to {most}")
    return Sampling(m.temperature, m.top_k, m.top_p, m.min_p, m.frequency_penalty, m.presence_penalty, repetition)


def _rules_from_pb(m: pb.TokenRules) -> TokenRules:
    biased = _int32_tuple(m.bias_ids, "bias_ids")
    require(len(biased) == len(m.bias), f"{len(biased)} bias_ids but {len(m.bias)} biases, expected equal counts")
    require(len(set(biased)) == len(biased), "bias_ids list a token twice; token ids must be distinct")
    require(all(abs(value) <= MAX_BIAS for value in m.bias), f"a logit bias is outside -{MAX_BIAS}..{MAX_BIAS}")
    words = tuple([_int32_tuple(word, "bad_words") for word in m.bad_words])
    require(all(words), "bad_words contain an empty sequence; remove it")
    bias = tuple(zip(biased, m.bias, strict=True))
    return TokenRules(bias, _int32_tuple(m.allowed, "allowed"), words, m.min_len)


def _scoring_from_pb(m: pb.Scoring) -> Scoring:
    scoring = Scoring(
        m.top if m.HasField("top") else None,
        m.prompt_top if m.HasField("prompt_top") else None,
    )
    most = max(scoring.top or 0, scoring.prompt_top or 0)
    require(most <= MAX_TOP, f"{most} likeliest tokens requested, expected at most {MAX_TOP}")
    return scoring


def _scores_from_pb(m: pb.TokenScores) -> tuple[TokenScore, ...]:
    count = len(m.logprobs) // 4
    sizes = (len(m.logprobs), len(m.ranks), len(m.top_ids), len(m.top_logprobs))
    require(count > 0 and sizes[:2] == (4 * count, 4 * count), f"score fields have {sizes} bytes, expected 4 per token")
    width = len(m.top_ids) // (4 * count)
    require(
        sizes[2:] == (4 * count * width, 4 * count * width),
        f"score fields have {sizes} bytes, expected equally many alternatives per token",
    )
    require(width <= MAX_TOP, f"scores list {width} tokens per position, expected at most {MAX_TOP}")
    ids = np.frombuffer(m.top_ids, dtype="<i4").reshape(count, width)
    require(width == 0 or int(ids.min()) >= 0, "scores contain a negative token id")
    columns = (
        np.frombuffer(m.logprobs, dtype="<f4").tolist(),
        np.frombuffer(m.ranks, dtype="<u4").tolist(),
        map(tuple, ids.tolist()),
        map(tuple, np.frombuffer(m.top_logprobs, dtype="<f4").reshape(count, width).tolist()),
    )
    return tuple([TokenScore(*row) for row in zip(*columns, strict=True)])


def _assignment_token_from_pb(m: pb.AssignmentToken) -> AssignmentToken:
    size = len(m.proof)
    require(size == PROOF_BYTES, f"an assignment token's proof has {size} bytes, expected {PROOF_BYTES}")
    return AssignmentToken(m.assignment, m.proof)


def _token_key_from(key: bytes) -> bytes:
    require(len(key) <= MAX_KEY_BYTES, f"token_key has {len(key)} bytes, expected at most {MAX_KEY_BYTES}")
    return key


def _traceparent_from(text: str) -> str:
    require(
        not text or _TRACEPARENT.fullmatch(text) is not None, f"traceparent {text[:64]!r} is not a W3C trace context"
    )
    return text


def _open_from_pb(m: pb.Open) -> Open:
    tokens = _int32_tuple(m.tokens, "tokens")
    require(0 < m.prompt_len <= len(tokens), f"prompt_len is {m.prompt_len}, expected 1..{len(tokens)}")
    require(m.max_len > len(tokens), f"max_len is {m.max_len}, expected more than {len(tokens)}")
    require(
        m.draft_tokens <= MAX_BLOCK_TOKENS,
        f"draft_tokens is {m.draft_tokens}, expected at most {MAX_BLOCK_TOKENS}",
    )
    rival = m.rival if m.HasField("rival") else None
    if rival is not None:
        require(m.audit and m.max_len == len(tokens) + 1, "rival is set, but only a one-token audit may have one")
    require(len(m.cache_salt) <= MAX_SALT_CHARS, f"cache_salt must have at most {MAX_SALT_CHARS} characters")
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
        draft_tokens=m.draft_tokens,
        target_address=m.target_address,
        audit=m.audit,
        rival=rival,
        token_key=_token_key_from(m.token_key),
        assignment_token=_assignment_token_from_pb(m.assignment_token) if m.HasField("assignment_token") else None,
        traceparent=_traceparent_from(m.traceparent),
        grammar=_grammar_from(m.grammar),
        rules=_rules_from_pb(m.rules) if m.HasField("rules") else NO_RULES,
        scoring=_scoring_from_pb(m.scoring) if m.HasField("scoring") else NO_SCORING,
        priority=m.priority,
        cache_salt=m.cache_salt,
        wants_rejected=m.wants_rejected,
        may_learn=m.may_learn,
        model=m.model,
        adapter=m.adapter,
        draft_prompt=_int32_tuple(m.draft_prompt, "draft_prompt"),
    )


def _grammar_from(grammar: str) -> str:
    size = len(grammar.encode())
    require(size <= MAX_GRAMMAR_BYTES, f"grammar has {size} bytes, expected at most {MAX_GRAMMAR_BYTES}")
    return grammar


def _tree_from(tokens: tuple[int, ...], parents: bytes) -> DraftTree:
    require(len(parents) == len(tokens), f"{len(parents)} parents for {len(tokens)} tokens, expected equal counts")
    require(
        all(parent <= node for node, parent in enumerate(parents)),
        "a draft token precedes its parent; parents must come first",
    )
    children = set(zip(parents, tokens, strict=True))
    require(len(children) == len(tokens), "two sibling tokens are equal; siblings must be distinct")
    return DraftTree(tokens, tuple([parent - 1 for parent in parents]))


def _attach_from_pb(m: pb.Attach) -> Attach:
    states_from = m.states_from if m.HasField("states_from") else None
    require(
        states_from is None or states_from <= m.have_len, f"states_from is {states_from}, expected at most {m.have_len}"
    )
    states_by = m.states_by if m.HasField("states_by") else None
    is_after = states_by is None or (states_from is not None and states_from <= states_by <= m.have_len)
    require(is_after, f"states_by is {states_by}, expected states_from ({states_from}) to {m.have_len}")
    assignment_token = _assignment_token_from_pb(m.assignment_token) if m.HasField("assignment_token") else None
    return Attach(m.session, m.have_len, m.have_hash, states_from, assignment_token, states_by, m.draft_version)


def _collapse_from_pb(m: pb.Collapse) -> Collapse:
    require(0.0 <= m.usual <= 1.0, f"collapse.usual is {m.usual}, expected 0 to 1")
    return Collapse(m.usual)


def _states_from_pb(m: pb.States) -> States:
    require(0 < m.width <= MAX_STATES_WIDTH, f"states.width is {m.width}, expected 1..{MAX_STATES_WIDTH}")
    layout = StatesFormat(m.width, StateDtype(m.dtype))
    rows, rest = divmod(len(m.rows), layout.row_bytes)
    require(rest == 0, f"states have {len(m.rows)} bytes, not a multiple of {layout.row_bytes}")
    require(0 < rows <= layout.rows_in_message, f"states have {rows} rows, expected 1 to {layout.rows_in_message}")
    return States(m.session, m.first, m.prefix_hash, layout.dtype, m.width, m.rows)


def _refusal_from_pb(m: pb.Refusal) -> Refusal:
    return Refusal(m.session, m.attempt, RefusalReason(m.reason), m.message)


FROM_PB: dict[type, Callable[[Any], Message]] = {
    pb.Hello: _hello_from_pb,
    pb.Welcome: _same_fields(Welcome),
    pb.Open: _open_from_pb,
    pb.Close: _same_fields(Close),
    pb.Attach: _attach_from_pb,
    pb.Detach: lambda m: Detach(m.session),
    pb.States: _states_from_pb,
    pb.StatesAck: _same_fields(StatesAck),
    pb.Resync: _same_fields(Resync),
    pb.Refusal: _refusal_from_pb,
    pb.Leaving: lambda m: Leaving(),
}
"""Converters of single messages."""


# ---------------------------------------------------------------- columns

Rows = tuple[list[Message], dict[int, str]]
"""Messages of the well-formed rows, in order, and the faults of the malformed ones by row."""

_ADDRESS = ("base_lens", "prefix_hashes")
_BLOCK_COLUMNS = attrgetter("sessions", *_ADDRESS, "token_counts")
_NO_DRAFT_COLUMNS = attrgetter("sessions", *_ADDRESS)
_VERDICT_COLUMNS = attrgetter(
    *("sessions", "attempts", *_ADDRESS),
    *("accepted", "drafted", "finishes", "answers", "prefix_cached", "token_counts"),
)
_DRAFT_REQUEST_COLUMNS = attrgetter(
    *("sessions", "attempts", *_ADDRESS, "max_tokens", "hold_steps", "least_chances", "shapes")
)
_FINISHES = {int(finish): finish for finish in Finish}
_ANSWERS = {int(answer): answer for answer in DraftAnswer}
_SHAPES = {int(shape): shape for shape in Shape}


def _columns(m: Any, names: Callable[[Any], tuple[Any, ...]]) -> list[list[Any]]:
    """Returns the columns of a message; raises ValueError if they differ in length."""
    columns = names(m)
    if len(set(map(len, columns))) > 1:
        raise ValueError(f"columns have {[*map(len, columns)]} entries, expected equally many")
    return [column[:] for column in columns]


def _token_rows(counts: Sequence[int], column: Sequence[int]) -> list[tuple[int, ...]]:
    """Splits a column of tokens into rows of the given lengths."""
    if sum(counts) != len(column):
        raise ValueError(f"token_counts add up to {sum(counts)}, but there are {len(column)} tokens")
    tokens = tuple(column[:])
    return [tokens[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def _detail_rows(details: Sequence[Any], count: int) -> list[Any]:
    """Returns the details of each of `count` rows; None if a row has none."""
    rows: list[Any] = [None] * count
    previous = -1
    for detail in details:
        if not previous < detail.row < count:
            raise ValueError(f"details of row {detail.row} of {count} are out of order, or there is no such row")
        previous = detail.row
        rows[previous] = detail
    return rows


def _rows(convert: Callable[..., Message], columns: Sequence[Sequence[Any]]) -> Rows:
    """Converts each row; the first column contains the sessions."""
    messages = []
    faults = {}
    for row, values in enumerate(zip(*columns, strict=True)):
        try:
            if not values[0]:
                raise ValueError("session is empty")
            messages.append(convert(*values))
        except ValueError as error:
            faults[row] = str(error)
    return messages, faults


def _blocks_from_pb(m: pb.Blocks) -> Rows:
    *columns, counts = _columns(m, _BLOCK_COLUMNS)
    return _rows(_block, (*columns, _token_rows(counts, m.tokens), _detail_rows(m.details, len(counts))))


def _block(
    session: str, base_len: int, prefix_hash: int, tokens: tuple[int, ...], details: pb.BlockDetails | None
) -> Block:
    if not 0 < len(tokens) <= MAX_BLOCK_TOKENS:
        raise ValueError(f"block has {len(tokens)} tokens, expected 1..{MAX_BLOCK_TOKENS}")
    if min(tokens) < 0:
        raise ValueError("tokens contains a negative token id")
    if details is None:
        return Block(session, base_len, prefix_hash, DraftTree.chain(tokens))
    probs = _sparse_from_pb(details.draft_probs, tokens) if details.HasField("draft_probs") else None
    tree = _tree_from(tokens, details.parents) if details.parents else DraftTree.chain(tokens, probs)
    require(tree.probs is probs, "block has both parents and draft_probs; send only one of them")
    return Block(session, base_len, prefix_hash, tree)


def _no_drafts_from_pb(m: pb.NoDrafts) -> Rows:
    return _rows(NoDraft, _columns(m, _NO_DRAFT_COLUMNS))


def _verdicts_from_pb(m: pb.Verdicts) -> Rows:
    *columns, counts = _columns(m, _VERDICT_COLUMNS)
    return _rows(_verdict, (*columns, _token_rows(counts, m.tokens), _detail_rows(m.details, len(counts))))


def _verdict(
    session: str,
    attempt: int,
    base_len: int,
    prefix_hash: int,
    accepted: int,
    drafted: int,
    finish: int,
    answer: int,
    prefix_cached: int,
    tokens: tuple[int, ...],
    details: pb.VerdictDetails | None,
) -> Verdict:
    decided = len(tokens)
    if not decided:
        raise ValueError("verdict has no tokens, expected at least one")
    if min(tokens) < 0:
        raise ValueError("tokens contains a negative token id")
    if accepted > drafted or accepted > decided:
        raise ValueError(f"accepted is {accepted}, expected at most {min(drafted, decided)}")
    if finish not in _FINISHES:
        raise ValueError(f"{finish} is not a valid Finish")
    if answer not in _ANSWERS:
        raise ValueError(f"{answer} is not a valid DraftAnswer")
    verdict = Verdict(
        session,
        attempt,
        base_len,
        prefix_hash,
        tokens,
        accepted,
        drafted,
        _FINISHES[finish],
        _ANSWERS[answer],
        prefix_cached=prefix_cached,
    )
    return verdict if details is None else replace(verdict, **_verdict_details(details, verdict))


def _verdict_details(m: pb.VerdictDetails, verdict: Verdict) -> dict[str, Any]:
    """Returns the rare fields of a verdict; the verdict contains the others."""
    rejected = _int32_tuple(m.rejected, "rejected")
    unaccepted = verdict.drafted - verdict.accepted
    require(len(rejected) <= unaccepted, f"rejected has {len(rejected)} tokens, expected at most {unaccepted}")
    margin = m.margin if m.HasField("margin") else None
    require(margin is None or 0 <= margin < math.inf, f"margin is {margin}, expected a finite number of 0 or more")
    scores = _scores_from_pb(m.scores) if m.HasField("scores") else ()
    decided = len(verdict.tokens)
    require(len(scores) in (0, decided), f"verdict has {len(scores)} scores, expected 0 or {decided}")
    return {
        "collapse": _collapse_from_pb(m.collapse) if m.HasField("collapse") else None,
        "margin": margin,
        "scores": scores,
        "prompt_scores": _scores_from_pb(m.prompt_scores) if m.HasField("prompt_scores") else (),
        "rejected": rejected,
    }


def _draft_requests_from_pb(m: pb.DraftRequests) -> Rows:
    return _rows(_draft_request, _columns(m, _DRAFT_REQUEST_COLUMNS))


def _draft_request(
    session: str,
    attempt: int,
    base_len: int,
    prefix_hash: int,
    max_tokens: int,
    hold_step: bool,
    least_chance: float,
    shape: int,
) -> DraftRequest:
    if not 0.0 <= least_chance <= 1.0:
        raise ValueError(f"least_chance is {least_chance}, expected 0 to 1")
    if shape not in _SHAPES:
        raise ValueError(f"{shape} is not a valid Shape")
    tokens = min(max_tokens, MAX_BLOCK_TOKENS)
    return DraftRequest(session, attempt, base_len, prefix_hash, tokens, hold_step, least_chance, _SHAPES[shape])


COLUMNS_FROM_PB: dict[type, tuple[type[Message], Callable[[Any], Rows]]] = {
    pb.Blocks: (Block, _blocks_from_pb),
    pb.NoDrafts: (NoDraft, _no_drafts_from_pb),
    pb.Verdicts: (Verdict, _verdicts_from_pb),
    pb.DraftRequests: (DraftRequest, _draft_requests_from_pb),
}
"""Message types sent as columns, and their converters, which raise ValueError if the columns do not form rows."""
