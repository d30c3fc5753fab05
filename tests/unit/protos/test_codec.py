"""Messages round-trip through the codec, and a malformed message or row does not affect its neighbors."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import speculation_pb2 as pb
from protos.codec import Decoded, Malformed, decode, encode, encoded_bytes, message_count
from protos.draft_tree import MAX_BLOCK_TOKENS, DraftTree, SparseProbs
from protos.from_pb import MAX_SPARSE_WIDTH
from protos.messages import (
    MAX_GRAMMAR_BYTES,
    MAX_STATES_WIDTH,
    MAX_TOP,
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
from tests.unit.cluster.samples import an_open
from tests.unit.trees import trees

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
IDS = st.integers(0, 2**31 - 1)
NAMES = st.text(min_size=1, max_size=8)


def token_lists(smallest: int, largest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(IDS, min_size=smallest, max_size=largest).map(tuple)


def floats(low: float, high: float, **kwargs: Any) -> st.SearchStrategy[float]:
    return st.floats(low, high, **kwargs)


SAMPLINGS = st.builds(
    Sampling,
    temperature=floats(0, 2),
    top_k=U32,
    top_p=floats(0, 1, exclude_min=True),
    min_p=floats(0, 1),
    frequency_penalty=floats(-2, 2),
    presence_penalty=floats(-2, 2),
    repetition_penalty=floats(0.01, 100),
)
RULES = st.builds(
    TokenRules,
    logit_bias=st.dictionaries(IDS, floats(-100, 100), max_size=3).map(lambda bias: tuple(bias.items())),
    allowed=token_lists(0, 3),
    bad_words=st.lists(token_lists(1, 3), max_size=2).map(tuple),
    min_len=U32,
)
TOPS = st.none() | st.integers(0, MAX_TOP)
SCORINGS = st.builds(Scoring, TOPS, TOPS)
F32 = st.floats(-1e9, 0, width=32)


ASSIGNMENT_TOKENS = st.builds(AssignmentToken, U32, st.binary(min_size=PROOF_BYTES, max_size=PROOF_BYTES))


@st.composite
def opens(draw: st.DrawFn) -> Open:
    tokens = draw(token_lists(1, 12))
    rival = draw(st.none() | U32)
    return Open(
        session=draw(NAMES),
        attempt=draw(U32),
        tokens=tokens,
        prompt_len=draw(st.integers(1, len(tokens))),
        max_len=draw(st.integers(len(tokens) + 1, 2**32 - 1)) if rival is None else len(tokens) + 1,
        stop_ids=draw(token_lists(0, 3)),
        sampling=draw(SAMPLINGS),
        seed=draw(U64),
        choice=draw(U32),
        hash_key=draw(U64),
        acceptance=draw(st.sampled_from(Acceptance)),
        draft_tokens=draw(st.integers(0, MAX_BLOCK_TOKENS)),
        target_address=draw(st.text(max_size=8)),
        audit=rival is not None or draw(st.booleans()),
        rival=rival,
        token_key=draw(st.binary(max_size=64)),
        assignment_token=draw(st.none() | ASSIGNMENT_TOKENS),
        traceparent=draw(st.just("") | st.from_regex("00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", fullmatch=True)),
        rules=draw(st.just(TokenRules()) | RULES),
        scoring=draw(SCORINGS),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        cache_salt=draw(st.text(max_size=8)),
        grammar=draw(st.text(max_size=8)),
        wants_rejected=draw(st.booleans()),
        may_learn=draw(st.booleans()),
        adapter=draw(st.text(max_size=5)),
        draft_prompt=draw(token_lists(0, 4)),
    )


@st.composite
def scores(draw: st.DrawFn, count: int) -> tuple[TokenScore, ...]:
    width = draw(st.integers(0, 3))
    ids = st.lists(IDS, min_size=width, max_size=width).map(tuple)
    tops = st.lists(F32, min_size=width, max_size=width).map(tuple)
    return tuple(TokenScore(draw(F32), draw(U32), draw(ids), draw(tops)) for _ in range(count))


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    tokens = draw(token_lists(1, 4))
    probs = None
    if draw(st.booleans()):
        width = draw(st.integers(1, 4))
        others = st.lists(IDS, min_size=width, max_size=width, unique=True)
        rows = [(token, *[i for i in draw(others) if i != token][: width - 1]) for token in tokens]
        padded = tuple(row + (0,) * (width - len(row)) for row in rows)
        weight = st.integers(1, 2**16 - 1)
        weights = tuple((*[draw(weight) for _ in row], *[0] * (width - len(row))) for row in rows)
        probs = SparseProbs(padded, weights)
    tree = DraftTree.chain(tokens, probs) if probs is not None else draw(trees(2**31, MAX_BLOCK_TOKENS).filter(len))
    return Block(draw(NAMES), draw(U32), draw(U64), tree)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    tokens = draw(token_lists(1, 5))
    accepted = draw(st.integers(0, len(tokens)))
    rejected = draw(token_lists(0, 3))
    return Verdict(
        session=draw(NAMES),
        attempt=draw(U32),
        base_len=draw(U32),
        prefix_hash=draw(U64),
        tokens=tokens,
        accepted=accepted,
        drafted=draw(st.integers(accepted + len(rejected), 2**32 - 1)),
        finish=draw(st.sampled_from(Finish)),
        answer=draw(st.sampled_from(DraftAnswer)),
        collapse=draw(st.none() | st.builds(Collapse, floats(0, 1))),
        margin=draw(st.none() | st.floats(0, 1e9)),
        prefix_cached=draw(U32),
        scores=draw(st.just(()) | scores(len(tokens))),
        prompt_scores=draw(st.just(()) | scores(draw(st.integers(1, 4)))),
        rejected=rejected,
    )


@st.composite
def attaches(draw: st.DrawFn) -> Attach:
    have_len = draw(U32)
    states_from = draw(st.none() | st.integers(0, have_len))
    states_by = None if states_from is None else draw(st.none() | st.integers(states_from, have_len))
    token = draw(st.none() | ASSIGNMENT_TOKENS)
    return Attach(draw(NAMES), have_len, draw(U64), states_from, token, states_by, draw(U32))


@st.composite
def states(draw: st.DrawFn) -> States:
    layout = StatesFormat(draw(st.integers(1, 9)), draw(st.sampled_from(StateDtype)))
    size = layout.row_bytes * draw(st.integers(1, 3))
    rows = draw(st.binary(min_size=size, max_size=size))
    return States(draw(NAMES), draw(U32), draw(U64), layout.dtype, layout.width, rows)


HELLOS = st.builds(
    Hello, NAMES, st.text(max_size=5), st.text(max_size=5), st.lists(st.builds(LiveSession, NAMES, U32)).map(tuple), U32
)
WELCOMES = st.builds(Welcome, NAMES, U32)
CLOSES = st.builds(Close, NAMES, U32)
NO_DRAFTS = st.builds(NoDraft, NAMES, U32, U64)
DETACHES = st.builds(Detach, NAMES)
STATES_ACKS = st.builds(StatesAck, NAMES, U32)
RESYNCS = st.builds(Resync, NAMES, U32, U64)
DRAFT_REQUESTS = st.builds(
    DraftRequest,
    NAMES,
    U32,
    U32,
    U64,
    st.integers(0, MAX_BLOCK_TOKENS),
    st.booleans(),
    st.floats(0.0, 1.0),
    st.sampled_from(Shape),
)
REFUSALS = st.builds(Refusal, NAMES, U32, st.sampled_from(RefusalReason), st.text(max_size=8))
FRAMES: dict[Any, tuple[st.SearchStrategy[Any], ...]] = {  # greeting, then repeated messages, in frame order
    pb.RouterToDrafter: (HELLOS, opens(), CLOSES),
    pb.DrafterToRouter: (WELCOMES, RESYNCS, REFUSALS),
    pb.RouterToTarget: (HELLOS, opens(), CLOSES),
    pb.TargetToRouter: (WELCOMES, verdicts(), REFUSALS),
    pb.DrafterToTarget: (HELLOS, DETACHES, attaches(), blocks(), NO_DRAFTS),
    pb.TargetToDrafter: (WELCOMES, verdicts(), states(), DRAFT_REQUESTS, RESYNCS),
    pb.DrafterToTargetStates: (HELLOS, STATES_ACKS),
    pb.TargetToDrafterStates: (WELCOMES, states()),
}


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.9), Sampling(top_p=1e-46), Sampling(min_p=1 / 3)])
def test_sampling_parameters_keep_double_precision(sampling):
    """Single precision would turn 0.9 into 0.89999998, and 1e-46 into 0, an invalid top_p."""
    request = an_open(sampling=sampling)
    (received,) = decode(encode(pb.RouterToTarget, [request])).messages
    assert received == request


@pytest.mark.parametrize("frame_type", FRAMES, ids=lambda t: t.__name__)
@given(data=st.data())
def test_every_message_of_every_frame_round_trips(frame_type, data):
    """Guards against a field that one direction of the codec forgets, swaps or narrows."""
    greeting, *repeated = FRAMES[frame_type]
    messages = [data.draw(greeting)] if data.draw(st.booleans()) else []
    for kind in repeated:
        messages += data.draw(st.lists(kind, max_size=2))
    wire = encode(frame_type, messages).SerializeToString()
    assert decode(frame_type.FromString(wire)) == Decoded(tuple(messages))


@pytest.mark.parametrize(
    ("frame_type", "before"),
    [(pb.TargetToRouter, Verdict("s", 1, 1, 0, (1,), 0, 0)), (pb.DrafterToRouter, Resync("s", 1, 0))],
)
def test_a_leaving_message_is_decoded_last(frame_type, before):
    """A verdict in the same frame belongs to the attempt that the router will give up."""
    wire = encode(frame_type, [Leaving(), before]).SerializeToString()
    assert decode(frame_type.FromString(wire)) == Decoded((before, Leaving()))


CHAIN = DraftTree.chain(tuple(range(100)))
SIZED = {
    "a prompt": (pb.RouterToTarget, an_open(tokens=tuple(range(4000)), max_len=4001)),
    "a verdict": (pb.TargetToDrafter, Verdict("s", 1, 1, 0, tuple(range(4000)), 0, 0)),
    "a verdict with rejected tokens": (
        pb.TargetToRouter,
        Verdict("s", 1, 1, 0, (1,), 0, 128, rejected=tuple(range(128))),
    ),
    "rules": (
        pb.RouterToTarget,
        an_open(
            rules=TokenRules(tuple((id, 1.0) for id in range(900)), tuple(range(900)), ((1, 2),) * 300),
            stop_ids=tuple(range(4096)),
            cache_salt="\N{SNOWMAN}" * 256,
        ),
    ),
    "a grammar": (pb.RouterToTarget, an_open(grammar="\N{SNOWMAN}" * 4000)),
    "a scored prompt": (
        pb.TargetToRouter,
        Verdict("s", 1, 1, 0, (5,), 0, 0, prompt_scores=(TokenScore(-1.0, 1, (1,) * 20, (-1.0,) * 20),) * 900),
    ),
    "states": (pb.TargetToDrafterStates, States("s", 7, 0, StateDtype.BFLOAT16, 64, bytes(12800))),
    "a chain": (pb.DrafterToTarget, Block("s", 1, 0, CHAIN)),
    "a tree": (pb.DrafterToTarget, Block("s", 1, 0, DraftTree(CHAIN.tokens, (-1,) * len(CHAIN)))),
    "a chain with its probabilities": (
        pb.DrafterToTarget,
        Block("s", 1, 0, DraftTree.chain(CHAIN.tokens, SparseProbs((CHAIN.tokens,) * 100, ((1,) * 100,) * 100))),
    ),
}


@pytest.mark.parametrize(("frame_type", "message"), SIZED.values(), ids=SIZED)
def test_the_estimated_size_of_a_message_is_close_to_its_encoded_size(frame_type, message):
    """The estimate limits frames and queues, so it must not be too low."""
    exact = len(encode(frame_type, [message]).SerializeToString())
    assert exact <= encoded_bytes(message) <= exact + 256


def test_a_message_that_a_frame_cannot_hold_is_an_error_of_the_sender():
    with pytest.raises(ValueError, match="verdicts"):
        encode(pb.RouterToTarget, [Verdict("s", 1, 1, 0, (1,), 0, 0)])
    with pytest.raises(KeyError):
        encode(pb.RouterToTarget, [LiveSession("s", 1)])  # type: ignore[list-item]


# ---------------------------------------------------------------- malformed messages


def ids(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


def weights(*values: int) -> bytes:
    return b"".join(value.to_bytes(2, "little") for value in values)


def good_open() -> pb.Open:
    message = Open("good", 3, (1, 2), 1, 9, (), Sampling(), 0, 0, 0, Acceptance.REJECTION, 4)
    return encode(pb.RouterToTarget, [message]).opens[0]


def good_attach() -> pb.Attach:
    return encode(pb.DrafterToTarget, [Attach("good", 4, 7, 2, states_by=3)]).attaches[0]


def good_states() -> pb.States:
    message = States("good", 3, 7, StateDtype.FLOAT8, 4, bytes(16))
    return encode(pb.TargetToDrafterStates, [message]).states[0]


def with_fields(field: str = "", **values: Any) -> Callable[[Any], None]:
    """Sets fields of a message, or of its submessage `field`."""

    def change(message: Any) -> None:
        for name, value in values.items():
            setattr(getattr(message, field) if field else message, name, value)

    return change


def with_part(field: str, part: Any) -> Callable[[Any], None]:
    """Replaces a submessage."""
    return lambda message: getattr(message, field).CopyFrom(part)


def with_rules(**values: Any) -> Callable[[pb.Open], None]:
    return with_part("rules", pb.TokenRules(**values))


def with_assignment_token(proof: bytes) -> Callable[[Any], None]:
    return with_part("assignment_token", pb.AssignmentToken(assignment=1, proof=proof))


BAD_OPENS = {
    "empty session": (with_fields(session=""), "session is empty"),
    "negative id": (with_fields(tokens=ids(1, -2)), "tokens contains a negative"),
    "negative stop id": (with_fields(stop_ids=ids(-1)), "stop_ids contains a negative"),
    "negative id in the draft's prompt": (with_fields(draft_prompt=ids(-1)), "draft_prompt contains a negative"),
    "half a token": (with_fields(tokens=ids(1, 2) + b"\0"), "multiple of 4"),
    "no tokens": (with_fields(tokens=b""), "prompt_len"),
    "no prompt": (with_fields(prompt_len=0), "prompt_len is 0"),
    "prompt beyond tokens": (with_fields(prompt_len=3), "prompt_len is 3, expected 1..2"),
    "no space": (with_fields(max_len=2), "max_len is 2"),
    "huge K": (with_fields(draft_tokens=2**32 - 1), "draft_tokens"),
    "unspecified acceptance": (with_fields(acceptance=0), "Acceptance"),
    "unknown acceptance": (with_fields(acceptance=77), "Acceptance"),
    "negative temperature": (with_fields("sampling", temperature=-1.0), "temperature is -1"),
    "NaN temperature": (with_fields("sampling", temperature=math.nan), "non-finite"),
    "infinite temperature": (with_fields("sampling", temperature=math.inf), "non-finite"),
    "top_p 0": (with_fields("sampling", top_p=0.0), "top_p is 0"),
    "top_p above 1": (with_fields("sampling", top_p=1.5), "top_p is 1.5"),
    "NaN top_p": (with_fields("sampling", top_p=math.nan), "non-finite"),
    "negative min_p": (with_fields("sampling", min_p=-0.5), "min_p is -0.5"),
    "NaN penalty": (with_fields("sampling", presence_penalty=math.nan), "non-finite"),
    "overflowing penalty": (with_fields("sampling", frequency_penalty=-3e38), "frequency_penalty"),
    "no repetition penalty": (with_fields("sampling", repetition_penalty=0.0), "repetition_penalty is 0"),
    "NaN repetition penalty": (with_fields("sampling", repetition_penalty=math.nan), "repetition_penalty is nan"),
    "overflowing repetition penalty": (with_fields("sampling", repetition_penalty=1e30), "repetition_penalty"),
    "bias of no token": (with_rules(bias=[1.0]), "0 bias_ids but 1 biases"),
    "bias twice": (with_rules(bias_ids=ids(1, 1), bias=[1.0, 2.0]), "a token twice"),
    "NaN bias": (with_rules(bias_ids=ids(1), bias=[math.nan]), "outside -100..100"),
    "overflowing bias": (with_rules(bias_ids=ids(1), bias=[1e30]), "outside -100..100"),
    "negative allowed id": (with_rules(allowed=ids(-1)), "allowed contains a negative"),
    "empty bad word": (with_rules(bad_words=[b""]), "an empty sequence"),
    "negative id in a bad word": (with_rules(bad_words=[ids(3, -1)]), "bad_words contains a negative"),
    "many likeliest tokens": (with_part("scoring", pb.Scoring(top=MAX_TOP + 1)), "likeliest tokens"),
    "many likeliest tokens of a prompt": (with_part("scoring", pb.Scoring(prompt_top=2**32 - 1)), "likeliest tokens"),
    "a long grammar": (with_fields(grammar="x" * (MAX_GRAMMAR_BYTES + 1)), "grammar has 65537 bytes"),
    "a long salt": (with_fields(cache_salt="x" * 257), "cache_salt"),
    "rival of no audit": (with_fields(rival=5, max_len=3), "one-token audit"),
    "rival of several tokens": (with_fields(rival=5, audit=True), "one-token audit"),
    "half a traceparent": (with_fields(traceparent="00-" + 32 * "a"), "is not a W3C trace context"),
    "a long token_key": (with_fields(token_key=bytes(65)), "token_key has 65 bytes"),
    "half an assignment token": (with_assignment_token(bytes(8)), "proof has 8 bytes"),
}
BAD_ATTACHES = {
    "empty session": (with_fields(session=""), "session is empty"),
    "states of tokens that it has not got": (with_fields(states_from=5), "states_from is 5, expected at most 4"),
    "no proof": (with_assignment_token(b""), "proof has 0 bytes"),
    "a long proof": (with_assignment_token(bytes(17)), "proof has 17 bytes"),
    "states that may begin before they are lacking": (with_fields(states_by=1), "states_by is 1, expected"),
    "states that may begin after what it has": (with_fields(states_by=5), "states_by is 5, expected"),
}
BAD_STATES = {
    "empty session": (with_fields(session=""), "session is empty"),
    "no rows": (with_fields(rows=b""), "0 rows"),
    "half a row": (with_fields(rows=bytes(12)), "12 bytes, not a multiple of 8"),
    "width 0": (with_fields(width=0), "states.width is 0"),
    "huge width": (with_fields(width=MAX_STATES_WIDTH + 1), "states.width is"),
    "a width that does not fit": (with_fields(width=5), "not a multiple of 9"),
    "more rows than a message has": (with_fields(rows=bytes(8 << 18)), "rows, expected 1 to 131072"),
    "unspecified dtype": (with_fields(dtype=0), "StateDtype"),
    "unknown dtype": (with_fields(dtype=9), "StateDtype"),
}
CASES = [
    pytest.param(frame, field, good, change, why, id=f"{kind}: {name}")
    for kind, frame, field, good, table in (
        ("Open", pb.RouterToTarget, "opens", good_open, BAD_OPENS),
        ("Attach", pb.DrafterToTarget, "attaches", good_attach, BAD_ATTACHES),
        ("States", pb.TargetToDrafterStates, "states", good_states, BAD_STATES),
        ("States with verdicts", pb.TargetToDrafter, "states", good_states, BAD_STATES),
    )
    for name, (change, why) in table.items()
]


@pytest.mark.parametrize(("frame_type", "field", "good", "change", "why"), CASES)
def test_a_malformed_message_does_not_affect_its_neighbors(frame_type, field, good, change, why):
    """The malformed message keeps its session and attempt, because the ledger ignores a Refusal of attempt 0."""
    bad = good()
    change(bad)
    neighbour = good()
    decoded = decode(frame_type(**{field: [neighbour, bad, neighbour]}))
    assert len(decoded.messages) == 2
    (malformed,) = decoded.malformed
    assert why in malformed.why
    assert malformed == Malformed(type(bad).__name__, bad.session, getattr(bad, "attempt", 0), malformed.why)


def test_a_refusal_of_unknown_kind_and_a_hello_without_a_name_are_malformed():
    frame = pb.TargetToRouter(refusals=[pb.Refusal(session="s", reason=9), pb.Refusal(session="s", reason=0)])
    assert [m.kind for m in decode(frame).malformed] == ["Refusal", "Refusal"]
    assert [m.kind for m in decode(pb.RouterToTarget(hello=pb.Hello())).malformed] == ["Hello"]


# ---------------------------------------------------------------- malformed rows


def with_entries(**values: Any) -> Callable[[Any], None]:
    """Sets the middle entries of columns."""

    def change(columns: Any) -> None:
        for name, value in values.items():
            getattr(columns, name)[1] = value

    return change


def with_tokens(*tokens: int, **entries: Any) -> Callable[[Any], None]:
    """Replaces the tokens of the middle row, and sets other entries."""

    def change(columns: Any) -> None:
        first = columns.token_counts[0]
        columns.tokens[first : first + columns.token_counts[1]] = tokens
        with_entries(token_counts=len(tokens), **entries)(columns)

    return change


def with_probs(**values: Any) -> Callable[[pb.Blocks], None]:
    """Sets fields of the middle row's draft probabilities."""
    return lambda columns: with_fields("draft_probs", **values)(columns.details[1])


def with_tree(*parents: int, tokens: tuple[int, ...] = (5, 6)) -> Callable[[pb.Blocks], None]:
    def change(columns: pb.Blocks) -> None:
        with_tokens(*tokens)(columns)
        columns.details[1].ClearField("draft_probs")
        columns.details[1].parents = bytes(parents)

    return change


def with_probs_and_parents(columns: pb.Blocks) -> None:
    columns.details[1].parents = bytes([0, 0])


def with_details(**values: Any) -> Callable[[pb.Verdicts], None]:
    """Adds details to the middle row."""
    return lambda columns: columns.details.append(pb.VerdictDetails(row=1, **values))


def with_scores(**values: Any) -> Callable[[pb.Verdicts], None]:
    good = {"logprobs": bytes(8), "ranks": bytes(8), "top_ids": ids(1, 2), "top_logprobs": bytes(8)}
    return with_details(scores=pb.TokenScores(**{**good, **values}))


BLOCK = Block("good", 2, 7, DraftTree.chain((5, 6), SparseProbs(((5, 8), (6, 8)), ((1, 1), (1, 1)))))
VERDICT = Verdict("good", 1, 2, 7, (5, 6), 1, 4)
DRAFT_REQUEST = DraftRequest("good", 1, 2, 7)
NO_DRAFT = NoDraft("good", 2, 7)

BAD_BLOCKS = {
    "empty session": (with_entries(sessions=""), "session is empty"),
    "no tokens": (with_tokens(), "block has 0 tokens"),
    "huge K": (with_tokens(*[1] * (MAX_BLOCK_TOKENS + 1)), f"{MAX_BLOCK_TOKENS + 1} tokens"),
    "negative id": (with_tokens(5, -6), "negative"),
    "probs of another length": (with_tokens(5, 6, 7), "3 x 2 entries"),
    "width 0": (with_probs(width=0), "width is 0"),
    "huge width": (with_probs(width=MAX_SPARSE_WIDTH + 1), "width"),
    "width that does not fit": (with_probs(width=3), "2 x 3 entries"),
    "half a weight": (with_probs(weights=weights(1, 1, 1, 1)[:-1]), "2 x 2 entries"),
    "token absent from its row": (with_probs(token_ids=ids(8, 9, 6, 8)), "probability zero"),
    "token with weight 0": (with_probs(weights=weights(0, 1, 1, 1)), "probability zero"),
    "all weights 0": (with_probs(weights=weights(1, 1, 0, 0)), "probability zero"),
    "a parent after its token": (with_tree(0, 2), "precedes its parent"),
    "too few parents": (with_tree(0), "1 parents for 2 tokens"),
    "equal siblings": (with_tree(0, 0, tokens=(5, 5)), "siblings must be distinct"),
    "a tree with probabilities": (with_probs_and_parents, "send only one of them"),
    "a token twice": (with_probs(token_ids=ids(5, 5, 6, 8)), "list a token twice"),
}
BAD_VERDICTS = {
    "scores of another number": (with_scores(logprobs=bytes(4), ranks=bytes(4)), "1 scores, expected 0 or 2"),
    "no scores": (with_scores(logprobs=b"", ranks=b"", top_ids=b"", top_logprobs=b""), "score fields have (0"),
    "too few ranks": (with_scores(ranks=bytes(4)), "4 per token"),
    "half a likeliest token": (with_scores(top_ids=bytes(6)), "equally many"),
    "too few numbers of likeliest tokens": (with_scores(top_logprobs=bytes(4)), "equally many"),
    "negative likeliest token": (with_scores(top_ids=ids(1, -2)), "negative token id"),
    "wide scores": (with_scores(top_ids=bytes(168), top_logprobs=bytes(168)), "21 tokens per position"),
    "empty session": (with_entries(sessions=""), "session is empty"),
    "no tokens": (with_tokens(), "has no tokens"),
    "no tokens at the end": (with_tokens(accepted=0, drafted=0, finishes=1), "has no tokens"),
    "more accepted than drafted": (with_entries(accepted=2, drafted=1), "accepted is 2, expected at most 1"),
    "more accepted than decided": (with_entries(accepted=3), "accepted is 3"),
    "more rejected than drafted": (with_details(rejected=ids(*range(9))), "rejected has 9 tokens"),
    "a negative id rejected": (with_details(rejected=ids(-1)), "rejected"),
    "half a rejected token": (with_details(rejected=bytes(3)), "not a multiple of 4"),
    "unknown finish": (with_entries(finishes=9), "Finish"),
    "negative finish": (with_entries(finishes=-1), "Finish"),
    "unknown answer": (with_entries(answers=9), "DraftAnswer"),
    "NaN margin": (with_details(margin=math.nan), "margin is nan"),
    "infinite margin": (with_details(margin=math.inf), "margin is inf"),
    "negative margin": (with_details(margin=-0.5), "margin is -0.5"),
    "negative id": (with_tokens(-1, 5), "negative"),
    "a share above 1": (with_details(collapse=pb.Collapse(usual=1.5)), "collapse.usual is 1.5"),
    "NaN share": (with_details(collapse=pb.Collapse(usual=math.nan)), "collapse.usual is nan"),
}
BAD_DRAFT_REQUESTS = {
    "empty session": (with_entries(sessions=""), "session is empty"),
    "a chance above 1": (with_entries(least_chances=1.5), "least_chance is 1.5"),
    "a negative chance": (with_entries(least_chances=-0.5), "least_chance is -0.5"),
    "NaN chance": (with_entries(least_chances=math.nan), "least_chance is nan"),
    "unspecified shape": (with_entries(shapes=0), "Shape"),
    "unknown shape": (with_entries(shapes=9), "Shape"),
}
ROW_CASES = [
    pytest.param(frame, field, message, change, why, id=f"{type(message).__name__}: {name}")
    for frame, field, message, table in (
        (pb.DrafterToTarget, "blocks", BLOCK, BAD_BLOCKS),
        (pb.DrafterToTarget, "no_drafts", NO_DRAFT, {"empty session": BAD_BLOCKS["empty session"]}),
        (pb.TargetToRouter, "verdicts", VERDICT, BAD_VERDICTS),
        (pb.TargetToDrafter, "draft_requests", DRAFT_REQUEST, BAD_DRAFT_REQUESTS),
    )
    for name, (change, why) in table.items()
]


@pytest.mark.parametrize(("frame_type", "field", "message", "change", "why"), ROW_CASES)
def test_a_malformed_row_does_not_affect_its_neighbors(frame_type, field, message, change, why):
    """The malformed row keeps its session and attempt, by which the router finds the session."""
    frame = encode(frame_type, [replace(message, session=name) for name in ("one", "bad", "two")])
    columns = getattr(frame, field)
    change(columns)
    decoded = decode(frame)
    assert decoded.messages == (replace(message, session="one"), replace(message, session="two"))
    (malformed,) = decoded.malformed
    assert why in malformed.why
    attempt = getattr(message, "attempt", 0)
    assert malformed == Malformed(type(message).__name__, columns.sessions[1], attempt, malformed.why)


def without_entry(name: str) -> Callable[[Any], None]:
    """Removes the last entry of a column."""
    return lambda columns: getattr(columns, name).pop()


def with_detail_rows(*rows: int) -> Callable[[pb.Verdicts], None]:
    return lambda columns: columns.details.extend([pb.VerdictDetails(row=row) for row in rows])


NO_ROWS = {
    "too few attempts": (without_entry("attempts"), "entries, expected equally many"),
    "too many answers": (lambda columns: columns.answers.append(0), "entries, expected equally many"),
    "no finishes": (lambda columns: columns.ClearField("finishes"), "entries, expected equally many"),
    "too few tokens": (without_entry("tokens"), "add up to 6, but there are 5"),
    "a huge count": (with_entries(token_counts=2**32 - 1), "but there are 6"),
    "details beyond the last row": (with_detail_rows(0, 3), "details of row 3 of 3"),
    "details twice": (with_detail_rows(1, 1), "details of row 1"),
    "details out of order": (with_detail_rows(2, 0), "details of row 0"),
}


@pytest.mark.parametrize(("change", "why"), NO_ROWS.values(), ids=NO_ROWS)
def test_columns_that_form_no_rows_make_each_of_their_messages_malformed(change, why):
    names = ("one", "two", "three")
    request = replace(DRAFT_REQUEST, session="one")
    frame = encode(pb.TargetToDrafter, [*[replace(VERDICT, session=name) for name in names], request])
    change(frame.verdicts)
    decoded = decode(frame)
    assert decoded.messages == (request,)
    assert [(m.kind, m.session) for m in decoded.malformed] == [("Verdict", name) for name in names]
    assert all(why in m.why for m in decoded.malformed)
    assert [m.attempt for m in decoded.malformed[:2]] == [1, 1]


def test_columns_without_sessions_are_malformed():
    decoded = decode(pb.DrafterToTarget(blocks=pb.Blocks(tokens=[1, 2])))
    assert [(m.kind, m.session) for m in decoded.malformed] == [("Block", "")]


def test_rows_are_counted_as_messages():
    frame = encode(pb.TargetToDrafter, [Welcome("t"), *[VERDICT] * 3, DRAFT_REQUEST, *[Resync("s", 1, 0)] * 2])
    assert message_count(frame) == 6


# ---------------------------------------------------------------- random frames

BLOCK_DETAILS = st.builds(
    pb.BlockDetails,
    row=st.integers(0, 3),
    parents=st.binary(max_size=6),
    draft_probs=st.builds(
        pb.SparseProbs,
        width=st.integers(0, 4) | U32,
        token_ids=st.binary(max_size=48),
        weights=st.binary(max_size=24),
    ),
)
I32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def random_blocks(draw: st.DrawFn) -> pb.Blocks:
    """Generates columns that usually form rows."""
    counts = draw(st.lists(st.integers(0, 5), max_size=3))
    rows = len(counts) + draw(st.sampled_from((0, 0, 0, 1)))
    size = sum(counts) + draw(st.sampled_from((0, 0, 0, 1)))
    return pb.Blocks(
        sessions=draw(st.lists(st.text(max_size=2), min_size=rows, max_size=rows)),
        base_lens=[0] * len(counts),
        prefix_hashes=[0] * len(counts),
        token_counts=counts,
        tokens=draw(st.lists(I32, min_size=size, max_size=size)),
        details=draw(st.lists(BLOCK_DETAILS, max_size=2)),
    )


OPENS = st.builds(
    pb.Open,
    session=st.text(max_size=2),
    tokens=st.binary(max_size=24),
    prompt_len=st.integers(0, 6) | U32,
    max_len=U32,
    stop_ids=st.binary(max_size=9),
    sampling=st.builds(pb.Sampling, temperature=st.floats(), top_k=U32, top_p=st.floats()),
    acceptance=I32,
    draft_tokens=U32,
)


@given(random_blocks(), OPENS)
def test_decoding_never_raises(columns, request):
    """One hostile field must not end a stream."""
    decoded = decode(pb.RouterToTarget(opens=[request]))
    assert len(decoded.messages) + len(decoded.malformed) == 1
    decoded = decode(pb.DrafterToTarget(blocks=columns))
    assert len(decoded.messages) + len(decoded.malformed) in (len(columns.sessions), 1)
