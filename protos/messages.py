"""Defines the messages between peers as frozen values.

`speculation.proto` documents every field. `to_pb` and `from_pb` convert to and from protobuf; this module does not
import protobuf. `TokenScore` and `Scoring` describe reported log probabilities. `StatesNeeded` and `StatesFormat`
describe hidden states; each row holds the states at one token's position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from protos.draft_tree import MAX_BLOCK_TOKENS, DraftTree
from protos.frozen import value

MAX_TOP = 20  # maximum number of alternatives per position


@value
class TokenScore:
    """Log probability and rank of the token at one position, and the likeliest tokens there."""

    logprob: float
    rank: int  # 1: the likeliest token
    top_ids: tuple[int, ...] = ()  # likeliest first
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Number of likeliest tokens to report per position; 0: only the token itself; None: no scores."""

    top: int | None = None  # for generated tokens
    prompt_top: int | None = None  # for prompt tokens

    @property
    def is_wanted(self) -> bool:
        return self.top is not None or self.prompt_top is not None


NO_SCORING = Scoring()


MAX_STATES_WIDTH = 1 << 18  # maximum elements per row: eight layers of hidden size 32,768
MAX_STATES_BYTES = 1 << 20  # maximum row bytes per message; a larger single row is allowed
SCALE_BYTES = 4  # bytes of the float32 scale at the end of a scaled row


class StateDtype(IntEnum):
    """Little-endian encoding of a row's elements."""

    BFLOAT16 = 1
    FLOAT8 = 2  # e4m3, with one float32 scale per row


@value
class StatesNeeded:
    """The target's hidden states required by a drafting method.

    Layers are numbered as in Hugging Face's `output_hidden_states`. 0 is the embedding output, and k is the residual
    stream after k layers. The highest number is the residual stream after the final norm. A row concatenates the states
    of all `layers` into `width` elements. If the method begins with a projection of single rows, the target may apply
    it and send `projected_width` elements instead.
    """

    layers: tuple[int, ...]
    width: int
    projected_width: int | None = None
    window: int | None = None  # number of latest states read by the method; None: all
    sees: int | None = None  # number of latest states that can affect a draft; None: all


@value
class StatesFormat:
    """Row format of hidden states."""

    width: int
    dtype: StateDtype

    @property
    def row_bytes(self) -> int:
        if self.dtype is StateDtype.FLOAT8:
            return self.width + SCALE_BYTES
        return 2 * self.width

    @property
    def rows_in_message(self) -> int:
        """Maximum number of rows per message."""
        return max(1, MAX_STATES_BYTES // self.row_bytes)


PROTOCOL_VERSION = 11
MAX_FRAME_BYTES = 16 << 20  # a 1M-token prompt takes 4 MiB; the blocks of 64 sessions take far less
MAX_GRAMMAR_BYTES = 1 << 16
PROOF_BYTES = 16  # size of an assignment token's proof


class Acceptance(IntEnum):
    """Exact acceptance rule for draft tokens: Gumbel coupling (COUPLED) or rejection sampling (REJECTION)."""

    COUPLED = 1
    REJECTION = 2


class Finish(IntEnum):
    """Reason for a session's end; NONE if the session continues."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class DraftAnswer(IntEnum):
    """Outcome of a draft request."""

    NOT_ASKED = 0
    GIVEN = 1  # a block or a NoDraft arrived in time
    MISSED = 2  # the step ran without the requested block


class Shape(IntEnum):
    """Block shape."""

    CHAIN = 1  # each token continues the previous one
    TREE = 2


class RefusalReason(IntEnum):
    INVALID = 1
    OVERLOADED = 2
    NONFINITE_LOGITS = 3  # any target with the same weights would fail alike


@value
class LiveSession:
    session: str
    attempt: int


@value
class Identity:
    """Fingerprints that must be equal before peers exchange tokens."""

    vocabulary: str
    target_model: str


@value
class Hello:
    peer_id: str
    vocabulary: str
    target_model: str
    live: tuple[LiveSession, ...] = ()
    protocol_version: int = PROTOCOL_VERSION


@value
class Welcome:
    peer_id: str
    protocol_version: int = PROTOCOL_VERSION


@value
class Sampling:
    """Sampling parameters; the defaults sample from the model's own distribution at temperature 1."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        additive = self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return additive or self.repetition_penalty != 1.0

    @property
    def is_filtered(self) -> bool:
        """True if top-k, top-p or min-p may exclude tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


GREEDY = Sampling(temperature=0.0)


@value
class TokenRules:
    """Token constraints and biases of a request; the defaults have no effect."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, logit bias) pairs; tokens are unique
    allowed: tuple[int, ...] = ()  # allowed token ids; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences; the last token is forbidden after the others
    min_len: int = 0  # minimum length before a stop id is allowed, prompt included

    @property
    def highest_id(self) -> int:
        biased = max([token for token, _ in self.logit_bias], default=0)
        return max(biased, max(self.allowed, default=0), max([max(word) for word in self.bad_words], default=0))


NO_RULES = TokenRules()


@value
class AssignmentToken:
    """Proves to a target that the session's router assigned the drafter."""

    assignment: int
    proof: bytes


@value
class Open:
    session: str
    attempt: int
    tokens: tuple[int, ...]
    prompt_len: int
    max_len: int
    stop_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    choice: int
    hash_key: int
    acceptance: Acceptance
    draft_tokens: int
    target_address: str = ""
    audit: bool = False  # repeats a finished request; yields to all sessions that are not audits
    rival: int | None = None  # for a one-token audit: the token to measure the margin against
    token_key: bytes = b""  # to a target: key for checking assignment tokens; empty: any drafter may draft
    assignment_token: AssignmentToken | None = None  # to a drafter: token to present to the target
    traceparent: str = ""  # W3C trace context of the router's span; empty: not traced
    grammar: str = ""  # grammar of the generated text, in llguidance notation; empty: any text
    rules: TokenRules = NO_RULES
    scoring: Scoring = NO_SCORING
    priority: int = 0  # lower numbers are admitted first
    cache_salt: str = ""
    wants_rejected: bool = False  # to a target: include rejected draft tokens in verdicts
    may_learn: bool = False  # to a drafter: may keep the session's hidden states as training data
    model: str = ""  # to a drafter: name of the model whose target verifies the session
    adapter: str = ""  # name of the LoRA adapter that the target applies; empty: none
    draft_prompt: tuple[int, ...] = ()  # to a drafter that translates: prompt in the draft's tokens; empty: translate

    @property
    def takes_trees(self) -> bool:
        """True if blocks may be trees; rejection sampling allows only chains, except at temperature 0."""
        return not self.uses_draft_probs

    @property
    def uses_draft_probs(self) -> bool:
        """True if acceptance of draft tokens depends on their draft probabilities."""
        return self.acceptance is Acceptance.REJECTION and not self.sampling.greedy

    @classmethod
    def measured(
        cls, session: str, tokens: tuple[int, ...], max_len: int, draft_tokens: int, sampling: Sampling = GREEDY
    ) -> "Open":
        """Returns the Open of a session that a replica runs locally to measure or test itself."""
        return cls(session, 1, tokens, len(tokens), max_len, (), sampling, 1, 0, 0, Acceptance.COUPLED, draft_tokens)


@value
class Close:
    session: str
    attempt: int


@value
class Block:
    session: str
    base_len: int
    prefix_hash: int
    tree: DraftTree

    @property
    def size(self) -> int:
        """Number of draft tokens."""
        return len(self.tree.tokens)


@value
class Attach:
    session: str
    have_len: int
    have_hash: int
    states_from: int | None = None  # first position with missing hidden states; None: the drafter reads none
    assignment_token: AssignmentToken | None = None
    states_by: int | None = None  # latest start position to use instead if earlier states must be recomputed
    draft_version: int = 0  # version of the learned draft; 0: the configured draft


@value
class Detach:
    session: str


@value
class NoDraft:
    session: str
    base_len: int
    prefix_hash: int


@value
class Collapse:
    """Reports that a session's blocks, usually good, are all rejected."""

    usual: float  # usual share of blocks with an accepted token


@value
class Verdict:
    session: str
    attempt: int
    base_len: int
    prefix_hash: int
    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    finish: Finish = Finish.NONE
    answer: DraftAnswer = DraftAnswer.NOT_ASKED
    collapse: Collapse | None = None
    margin: float | None = None  # logit lead of the committed token over the Open's rival
    scores: tuple[TokenScore, ...] = ()  # scores of `tokens`, if the Open requests them
    prompt_scores: tuple[TokenScore, ...] = ()  # scores of the prompt from its second token; only in the first verdict
    prefix_cached: int = 0  # number of the Open's tokens already cached at admission
    rejected: tuple[int, ...] = ()  # to a router, on request: draft tokens after the accepted ones


@value
class DraftRequest:
    """A target's request for a block after the given prefix, valid until the next request."""

    session: str
    attempt: int
    base_len: int
    prefix_hash: int
    max_tokens: int = MAX_BLOCK_TOKENS
    hold_step: bool = True  # True: the target delays its next step for the block
    least_chance: float = 0.0  # minimum cumulative acceptance probability of a token worth verifying
    shape: Shape = Shape.CHAIN


@value
class States:
    """The target's hidden states from position `first` on; `prefix_hash` covers all tokens up to the last row."""

    session: str
    first: int
    prefix_hash: int
    dtype: StateDtype
    width: int
    rows: bytes

    @property
    def format(self) -> StatesFormat:
        return StatesFormat(self.width, self.dtype)

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.first + len(self.rows) // self.format.row_bytes


@value
class StatesAck:
    """Acknowledges the hidden states of a session's first `have_len` positions."""

    session: str
    have_len: int


@value
class Resync:
    session: str
    have_len: int
    have_hash: int


@value
class Refusal:
    session: str
    attempt: int
    reason: RefusalReason
    message: str


@value
class Leaving:
    """Announces a planned shutdown: the sender refuses new sessions, and its existing ones must move elsewhere."""


Message = (
    Hello
    | Welcome
    | Open
    | Close
    | Block
    | NoDraft
    | Attach
    | Detach
    | Verdict
    | States
    | StatesAck
    | DraftRequest
    | Resync
    | Refusal
    | Leaving
)
Frame = Sequence[Message]
"""All messages due for one peer, ordered within each type."""
