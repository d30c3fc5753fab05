from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Acceptance(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_UNSPECIFIED: _ClassVar[Acceptance]
    COUPLED: _ClassVar[Acceptance]
    REJECTION: _ClassVar[Acceptance]

class DraftAnswer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOT_ASKED: _ClassVar[DraftAnswer]
    GIVEN: _ClassVar[DraftAnswer]
    MISSED: _ClassVar[DraftAnswer]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]

class Shape(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHAPE_UNSPECIFIED: _ClassVar[Shape]
    CHAIN: _ClassVar[Shape]
    TREE: _ClassVar[Shape]

class StateDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_DTYPE_UNSPECIFIED: _ClassVar[StateDtype]
    BFLOAT16: _ClassVar[StateDtype]
    FLOAT8: _ClassVar[StateDtype]

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_INVALID: _ClassVar[RefusalReason]
    REFUSAL_OVERLOADED: _ClassVar[RefusalReason]
    REFUSAL_NONFINITE_LOGITS: _ClassVar[RefusalReason]
ACCEPTANCE_UNSPECIFIED: Acceptance
COUPLED: Acceptance
REJECTION: Acceptance
NOT_ASKED: DraftAnswer
GIVEN: DraftAnswer
MISSED: DraftAnswer
FINISH_NONE: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
SHAPE_UNSPECIFIED: Shape
CHAIN: Shape
TREE: Shape
STATE_DTYPE_UNSPECIFIED: StateDtype
BFLOAT16: StateDtype
FLOAT8: StateDtype
REFUSAL_UNSPECIFIED: RefusalReason
REFUSAL_INVALID: RefusalReason
REFUSAL_OVERLOADED: RefusalReason
REFUSAL_NONFINITE_LOGITS: RefusalReason

class Hello(_message.Message):
    __slots__ = ("protocol_version", "peer_id", "vocabulary", "target_model", "live")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODEL_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    peer_id: str
    vocabulary: str
    target_model: str
    live: _containers.RepeatedCompositeFieldContainer[LiveSession]
    def __init__(self, protocol_version: _Optional[int] = ..., peer_id: _Optional[str] = ..., vocabulary: _Optional[str] = ..., target_model: _Optional[str] = ..., live: _Optional[_Iterable[_Union[LiveSession, _Mapping]]] = ...) -> None: ...

class LiveSession(_message.Message):
    __slots__ = ("session", "attempt")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    session: str
    attempt: int
    def __init__(self, session: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "peer_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    peer_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., peer_id: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class TokenRules(_message.Message):
    __slots__ = ("bias_ids", "bias", "allowed", "bad_words", "min_len")
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_LEN_FIELD_NUMBER: _ClassVar[int]
    bias_ids: bytes
    bias: _containers.RepeatedScalarFieldContainer[float]
    allowed: bytes
    bad_words: _containers.RepeatedScalarFieldContainer[bytes]
    min_len: int
    def __init__(self, bias_ids: _Optional[bytes] = ..., bias: _Optional[_Iterable[float]] = ..., allowed: _Optional[bytes] = ..., bad_words: _Optional[_Iterable[bytes]] = ..., min_len: _Optional[int] = ...) -> None: ...

class Scoring(_message.Message):
    __slots__ = ("top", "prompt_top")
    TOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_FIELD_NUMBER: _ClassVar[int]
    top: int
    prompt_top: int
    def __init__(self, top: _Optional[int] = ..., prompt_top: _Optional[int] = ...) -> None: ...

class AssignmentToken(_message.Message):
    __slots__ = ("assignment", "proof")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    assignment: int
    proof: bytes
    def __init__(self, assignment: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "attempt", "tokens", "prompt_len", "max_len", "stop_ids", "sampling", "seed", "choice", "hash_key", "acceptance", "draft_tokens", "target_address", "audit", "rival", "token_key", "assignment_token", "grammar", "rules", "scoring", "priority", "cache_salt", "wants_rejected", "traceparent", "may_learn", "model", "adapter", "draft_prompt")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    HASH_KEY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    RIVAL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_KEY_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    SCORING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    WANTS_REJECTED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    MAY_LEARN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROMPT_FIELD_NUMBER: _ClassVar[int]
    session: str
    attempt: int
    tokens: bytes
    prompt_len: int
    max_len: int
    stop_ids: bytes
    sampling: Sampling
    seed: int
    choice: int
    hash_key: int
    acceptance: Acceptance
    draft_tokens: int
    target_address: str
    audit: bool
    rival: int
    token_key: bytes
    assignment_token: AssignmentToken
    grammar: str
    rules: TokenRules
    scoring: Scoring
    priority: int
    cache_salt: str
    wants_rejected: bool
    traceparent: str
    may_learn: bool
    model: str
    adapter: str
    draft_prompt: bytes
    def __init__(self, session: _Optional[str] = ..., attempt: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., max_len: _Optional[int] = ..., stop_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., hash_key: _Optional[int] = ..., acceptance: _Optional[_Union[Acceptance, str]] = ..., draft_tokens: _Optional[int] = ..., target_address: _Optional[str] = ..., audit: _Optional[bool] = ..., rival: _Optional[int] = ..., token_key: _Optional[bytes] = ..., assignment_token: _Optional[_Union[AssignmentToken, _Mapping]] = ..., grammar: _Optional[str] = ..., rules: _Optional[_Union[TokenRules, _Mapping]] = ..., scoring: _Optional[_Union[Scoring, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., wants_rejected: _Optional[bool] = ..., traceparent: _Optional[str] = ..., may_learn: _Optional[bool] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., draft_prompt: _Optional[bytes] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session", "attempt")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    session: str
    attempt: int
    def __init__(self, session: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class SparseProbs(_message.Message):
    __slots__ = ("width", "token_ids", "weights")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    width: int
    token_ids: bytes
    weights: bytes
    def __init__(self, width: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., weights: _Optional[bytes] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("sessions", "base_lens", "prefix_hashes", "token_counts", "tokens", "details")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    prefix_hashes: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedCompositeFieldContainer[BlockDetails]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., base_lens: _Optional[_Iterable[int]] = ..., prefix_hashes: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[_Union[BlockDetails, _Mapping]]] = ...) -> None: ...

class BlockDetails(_message.Message):
    __slots__ = ("row", "draft_probs", "parents")
    ROW_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    row: int
    draft_probs: SparseProbs
    parents: bytes
    def __init__(self, row: _Optional[int] = ..., draft_probs: _Optional[_Union[SparseProbs, _Mapping]] = ..., parents: _Optional[bytes] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("session", "have_len", "have_hash", "states_from", "assignment_token", "states_by", "draft_version")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    HAVE_HASH_FIELD_NUMBER: _ClassVar[int]
    STATES_FROM_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATES_BY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VERSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    have_len: int
    have_hash: int
    states_from: int
    assignment_token: AssignmentToken
    states_by: int
    draft_version: int
    def __init__(self, session: _Optional[str] = ..., have_len: _Optional[int] = ..., have_hash: _Optional[int] = ..., states_from: _Optional[int] = ..., assignment_token: _Optional[_Union[AssignmentToken, _Mapping]] = ..., states_by: _Optional[int] = ..., draft_version: _Optional[int] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class NoDrafts(_message.Message):
    __slots__ = ("sessions", "base_lens", "prefix_hashes")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    prefix_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., base_lens: _Optional[_Iterable[int]] = ..., prefix_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class Collapse(_message.Message):
    __slots__ = ("usual",)
    USUAL_FIELD_NUMBER: _ClassVar[int]
    usual: float
    def __init__(self, usual: _Optional[float] = ...) -> None: ...

class TokenScores(_message.Message):
    __slots__ = ("logprobs", "ranks", "top_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Verdicts(_message.Message):
    __slots__ = ("sessions", "attempts", "base_lens", "prefix_hashes", "token_counts", "tokens", "accepted", "drafted", "finishes", "answers", "prefix_cached", "details")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHED_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    prefix_hashes: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    drafted: _containers.RepeatedScalarFieldContainer[int]
    finishes: _containers.RepeatedScalarFieldContainer[Finish]
    answers: _containers.RepeatedScalarFieldContainer[DraftAnswer]
    prefix_cached: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedCompositeFieldContainer[VerdictDetails]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., prefix_hashes: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., drafted: _Optional[_Iterable[int]] = ..., finishes: _Optional[_Iterable[_Union[Finish, str]]] = ..., answers: _Optional[_Iterable[_Union[DraftAnswer, str]]] = ..., prefix_cached: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[_Union[VerdictDetails, _Mapping]]] = ...) -> None: ...

class VerdictDetails(_message.Message):
    __slots__ = ("row", "collapse", "margin", "scores", "prompt_scores", "rejected")
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLLAPSE_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    row: int
    collapse: Collapse
    margin: float
    scores: TokenScores
    prompt_scores: TokenScores
    rejected: bytes
    def __init__(self, row: _Optional[int] = ..., collapse: _Optional[_Union[Collapse, _Mapping]] = ..., margin: _Optional[float] = ..., scores: _Optional[_Union[TokenScores, _Mapping]] = ..., prompt_scores: _Optional[_Union[TokenScores, _Mapping]] = ..., rejected: _Optional[bytes] = ...) -> None: ...

class DraftRequests(_message.Message):
    __slots__ = ("sessions", "attempts", "base_lens", "prefix_hashes", "max_tokens", "hold_steps", "least_chances", "shapes")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOLD_STEPS_FIELD_NUMBER: _ClassVar[int]
    LEAST_CHANCES_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    prefix_hashes: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: _containers.RepeatedScalarFieldContainer[int]
    hold_steps: _containers.RepeatedScalarFieldContainer[bool]
    least_chances: _containers.RepeatedScalarFieldContainer[float]
    shapes: _containers.RepeatedScalarFieldContainer[Shape]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., prefix_hashes: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[_Iterable[int]] = ..., hold_steps: _Optional[_Iterable[bool]] = ..., least_chances: _Optional[_Iterable[float]] = ..., shapes: _Optional[_Iterable[_Union[Shape, str]]] = ...) -> None: ...

class States(_message.Message):
    __slots__ = ("session", "first", "prefix_hash", "dtype", "width", "rows")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    session: str
    first: int
    prefix_hash: int
    dtype: StateDtype
    width: int
    rows: bytes
    def __init__(self, session: _Optional[str] = ..., first: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., dtype: _Optional[_Union[StateDtype, str]] = ..., width: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...

class StatesAck(_message.Message):
    __slots__ = ("session", "have_len")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    session: str
    have_len: int
    def __init__(self, session: _Optional[str] = ..., have_len: _Optional[int] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("session", "have_len", "have_hash")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    HAVE_HASH_FIELD_NUMBER: _ClassVar[int]
    session: str
    have_len: int
    have_hash: int
    def __init__(self, session: _Optional[str] = ..., have_len: _Optional[int] = ..., have_hash: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("session", "attempt", "reason", "message")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    session: str
    attempt: int
    reason: RefusalReason
    message: str
    def __init__(self, session: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[RefusalReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterToDrafter(_message.Message):
    __slots__ = ("hello", "opens", "closes")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    opens: _containers.RepeatedCompositeFieldContainer[Open]
    closes: _containers.RepeatedCompositeFieldContainer[Close]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[Open, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[Close, _Mapping]]] = ...) -> None: ...

class DrafterToRouter(_message.Message):
    __slots__ = ("welcome", "resyncs", "refusals", "leaving")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    resyncs: _containers.RepeatedCompositeFieldContainer[Resync]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    leaving: Leaving
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., resyncs: _Optional[_Iterable[_Union[Resync, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class RouterToTarget(_message.Message):
    __slots__ = ("hello", "opens", "closes")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    opens: _containers.RepeatedCompositeFieldContainer[Open]
    closes: _containers.RepeatedCompositeFieldContainer[Close]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[Open, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[Close, _Mapping]]] = ...) -> None: ...

class TargetToRouter(_message.Message):
    __slots__ = ("welcome", "verdicts", "refusals", "leaving")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    verdicts: Verdicts
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    leaving: Leaving
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., verdicts: _Optional[_Union[Verdicts, _Mapping]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class DrafterToTarget(_message.Message):
    __slots__ = ("hello", "detaches", "attaches", "blocks", "no_drafts")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DETACHES_FIELD_NUMBER: _ClassVar[int]
    ATTACHES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NO_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    detaches: _containers.RepeatedCompositeFieldContainer[Detach]
    attaches: _containers.RepeatedCompositeFieldContainer[Attach]
    blocks: Blocks
    no_drafts: NoDrafts
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., detaches: _Optional[_Iterable[_Union[Detach, _Mapping]]] = ..., attaches: _Optional[_Iterable[_Union[Attach, _Mapping]]] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., no_drafts: _Optional[_Union[NoDrafts, _Mapping]] = ...) -> None: ...

class TargetToDrafter(_message.Message):
    __slots__ = ("welcome", "verdicts", "states", "draft_requests", "resyncs")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    verdicts: Verdicts
    states: _containers.RepeatedCompositeFieldContainer[States]
    draft_requests: DraftRequests
    resyncs: _containers.RepeatedCompositeFieldContainer[Resync]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., verdicts: _Optional[_Union[Verdicts, _Mapping]] = ..., states: _Optional[_Iterable[_Union[States, _Mapping]]] = ..., draft_requests: _Optional[_Union[DraftRequests, _Mapping]] = ..., resyncs: _Optional[_Iterable[_Union[Resync, _Mapping]]] = ...) -> None: ...

class DrafterToTargetStates(_message.Message):
    __slots__ = ("hello", "acks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    acks: _containers.RepeatedCompositeFieldContainer[StatesAck]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., acks: _Optional[_Iterable[_Union[StatesAck, _Mapping]]] = ...) -> None: ...

class TargetToDrafterStates(_message.Message):
    __slots__ = ("welcome", "states")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    states: _containers.RepeatedCompositeFieldContainer[States]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., states: _Optional[_Iterable[_Union[States, _Mapping]]] = ...) -> None: ...
