"""Converts domain messages to protobuf messages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from google.protobuf.message import Message as ProtoMessage

from protos import speculation_pb2 as pb
from protos.draft_tree import SparseProbs
from protos.messages import (
    NO_RULES,
    AssignmentToken,
    Attach,
    Block,
    Close,
    Collapse,
    Detach,
    DraftRequest,
    Hello,
    Leaving,
    NoDraft,
    Open,
    Refusal,
    Resync,
    Sampling,
    States,
    StatesAck,
    TokenRules,
    TokenScore,
    Verdict,
    Welcome,
)


def _int32_bytes(values: Iterable[int]) -> bytes:
    return np.fromiter(values, dtype="<i4").tobytes()


def _same_fields(kind: type[Any], proto: type[ProtoMessage]) -> Callable[[Any], Any]:
    """Returns a converter for a message type with identical fields in both forms."""
    names = [field.name for field in fields(kind)]
    return lambda m: proto(**{name: getattr(m, name) for name in names})


_sampling_to_pb = _same_fields(Sampling, pb.Sampling)
_assignment_token_to_pb = _same_fields(AssignmentToken, pb.AssignmentToken)
_collapse_to_pb = _same_fields(Collapse, pb.Collapse)


def _sparse_to_pb(probs: SparseProbs) -> pb.SparseProbs:
    return pb.SparseProbs(
        width=len(probs.token_ids[0]) if probs.token_ids else 0,
        token_ids=np.asarray(probs.token_ids, dtype="<u4").tobytes(),
        weights=np.asarray(probs.weights, dtype="<u2").tobytes(),
    )


def _hello_to_pb(m: Hello) -> pb.Hello:
    return pb.Hello(
        protocol_version=m.protocol_version,
        peer_id=m.peer_id,
        vocabulary=m.vocabulary,
        target_model=m.target_model,
        live=[pb.LiveSession(session=s.session, attempt=s.attempt) for s in m.live],
    )


def _open_to_pb(m: Open) -> pb.Open:
    return pb.Open(
        session=m.session,
        attempt=m.attempt,
        tokens=_int32_bytes(m.tokens),
        prompt_len=m.prompt_len,
        max_len=m.max_len,
        stop_ids=_int32_bytes(m.stop_ids),
        sampling=_sampling_to_pb(m.sampling),
        seed=m.seed,
        choice=m.choice,
        hash_key=m.hash_key,
        acceptance=pb.Acceptance.Name(m.acceptance),
        draft_tokens=m.draft_tokens,
        target_address=m.target_address,
        audit=m.audit,
        rival=m.rival,
        token_key=m.token_key,
        assignment_token=_assignment_token_to_pb(m.assignment_token) if m.assignment_token else None,
        traceparent=m.traceparent,
        grammar=m.grammar,
        rules=_rules_to_pb(m.rules) if m.rules != NO_RULES else None,
        scoring=pb.Scoring(top=m.scoring.top, prompt_top=m.scoring.prompt_top) if m.scoring.is_wanted else None,
        priority=m.priority,
        cache_salt=m.cache_salt,
        wants_rejected=m.wants_rejected,
        may_learn=m.may_learn,
        model=m.model,
        adapter=m.adapter,
        draft_prompt=_int32_bytes(m.draft_prompt),
    )


def _rules_to_pb(m: TokenRules) -> pb.TokenRules:
    return pb.TokenRules(
        bias_ids=_int32_bytes([token for token, _ in m.logit_bias]),
        bias=[value for _, value in m.logit_bias],
        allowed=_int32_bytes(m.allowed),
        bad_words=[_int32_bytes(word) for word in m.bad_words],
        min_len=m.min_len,
    )


def _block_columns(blocks: Sequence[Block]) -> dict[str, Any]:
    trees = [m.tree for m in blocks]
    return {
        "sessions": [m.session for m in blocks],
        "base_lens": [m.base_len for m in blocks],
        "prefix_hashes": [m.prefix_hash for m in blocks],
        "token_counts": [len(tree.tokens) for tree in trees],
        "tokens": [token for tree in trees for token in tree.tokens],
        "details": [
            pb.BlockDetails(
                row=row,
                draft_probs=_sparse_to_pb(tree.probs) if tree.probs is not None else None,
                parents=b"" if tree.is_chain else bytes([parent + 1 for parent in tree.parents]),
            )
            for row, tree in enumerate(trees)
            if tree.probs is not None or not tree.is_chain
        ]
        or None,
    }


def _attach_to_pb(m: Attach) -> pb.Attach:
    return pb.Attach(
        session=m.session,
        have_len=m.have_len,
        have_hash=m.have_hash,
        states_from=m.states_from,
        assignment_token=_assignment_token_to_pb(m.assignment_token) if m.assignment_token else None,
        states_by=m.states_by,
        draft_version=m.draft_version,
    )


def _no_draft_columns(reports: Sequence[NoDraft]) -> dict[str, Any]:
    return {
        "sessions": [m.session for m in reports],
        "base_lens": [m.base_len for m in reports],
        "prefix_hashes": [m.prefix_hash for m in reports],
    }


def _verdict_columns(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "sessions": [m.session for m in verdicts],
        "attempts": [m.attempt for m in verdicts],
        "base_lens": [m.base_len for m in verdicts],
        "prefix_hashes": [m.prefix_hash for m in verdicts],
        "token_counts": [len(m.tokens) for m in verdicts],
        "tokens": [token for m in verdicts for token in m.tokens],
        "accepted": [m.accepted for m in verdicts],
        "drafted": [m.drafted for m in verdicts],
        "finishes": [m.finish for m in verdicts],
        "answers": [m.answer for m in verdicts],
        "prefix_cached": [m.prefix_cached for m in verdicts],
        "details": [
            pb.VerdictDetails(
                row=row,
                collapse=_collapse_to_pb(m.collapse) if m.collapse is not None else None,
                margin=m.margin,
                scores=_scores_to_pb(m.scores),
                prompt_scores=_scores_to_pb(m.prompt_scores),
                rejected=_int32_bytes(m.rejected),
            )
            for row, m in enumerate(verdicts)
            if m.scores or m.rejected or m.prompt_scores or m.collapse is not None or m.margin is not None
        ]
        or None,
    }


def _scores_to_pb(scores: Sequence[TokenScore]) -> pb.TokenScores | None:
    if not scores:
        return None
    return pb.TokenScores(
        logprobs=np.asarray([score.logprob for score in scores], dtype="<f4").tobytes(),
        ranks=np.asarray([score.rank for score in scores], dtype="<u4").tobytes(),
        top_ids=np.asarray([score.top_ids for score in scores], dtype="<i4").tobytes(),
        top_logprobs=np.asarray([score.top_logprobs for score in scores], dtype="<f4").tobytes(),
    )


def _draft_request_columns(requests: Sequence[DraftRequest]) -> dict[str, Any]:
    return {
        "sessions": [m.session for m in requests],
        "attempts": [m.attempt for m in requests],
        "base_lens": [m.base_len for m in requests],
        "prefix_hashes": [m.prefix_hash for m in requests],
        "max_tokens": [m.max_tokens for m in requests],
        "hold_steps": [m.hold_step for m in requests],
        "least_chances": [m.least_chance for m in requests],
        "shapes": [m.shape for m in requests],
    }


def _states_ack_to_pb(m: StatesAck) -> pb.StatesAck:
    return pb.StatesAck(session=m.session, have_len=m.have_len)


TO_PB: dict[type, Callable[[Any], ProtoMessage]] = {
    Hello: _hello_to_pb,
    Welcome: _same_fields(Welcome, pb.Welcome),
    Open: _open_to_pb,
    Close: _same_fields(Close, pb.Close),
    Attach: _attach_to_pb,
    Detach: _same_fields(Detach, pb.Detach),
    States: _same_fields(States, pb.States),
    StatesAck: _states_ack_to_pb,
    Resync: _same_fields(Resync, pb.Resync),
    Refusal: _same_fields(Refusal, pb.Refusal),
    Leaving: _same_fields(Leaving, pb.Leaving),
}
"""Converters of single messages."""

COLUMNS: dict[type, Callable[[Any], dict[str, Any]]] = {
    Block: _block_columns,
    NoDraft: _no_draft_columns,
    Verdict: _verdict_columns,
    DraftRequest: _draft_request_columns,
}
"""Functions that return the columns of a frame's messages of one type; None stands for no details."""
