"""Messages between peers, as frozen values.

`speculation.proto` documents every field. `to_pb` and `from_pb` translate to and from protobuf; this module does not
depend on it. `TokenScore` and `Scoring` describe reported log probabilities. `StatesNeeded` and `StatesFormat` describe
hidden states: a row holds the states after one token, at that token's position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from protos.draft_tree import MAX_BLOCK_TOKENS, DraftTree
from protos.frozen import value

MAX_TOP = 20  # most alternatives reported per position


@value
class TokenScore:
    """Score of one position: its token's log probability and rank, and the likeliest tokens there."""

    logprob: float
    rank: int  # 1 is the likeliest token
    top_ids: tuple[int, ...] = ()  # likeliest token first
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Number of most likely tokens to report per position; None: no scores."""

    top: int | None = None  # for each generated token
    prompt_top: int | None = None  # for each prompt token

    @property
    def is_wanted(self) -> bool:
        return self.top is not None or self.prompt_top is not None


NO_SCORING = Scoring()


MAX_STATES_WIDTH = 1 << 18  # elements per row: eight layers of a model with hidden size 32,768
MAX_STATES_BYTES = 1 << 20  # most bytes of rows in one message, unless a single row is larger
SCALE_BYTES = 4  # bytes of the float32 scale after the elements of a scaled row


class StateDtype(IntEnum):
    """Encoding of a row's elements, little-endian."""

    BFLOAT16 = 1
    FLOAT8 = 2  # e4m3, with one float32 factor for all elements of the row


@value
class StatesNeeded:
    """Hidden states of the target that a drafting method reads.

    Layers are numbered as in Hugging Face's `output_hidden_states`: 0 is the embeddings, k the residual stream after k
    layers, and the model's number of layers is the stream after its final norm. A row concatenates the states of all
    `layers`, `width` elements. If the method first projects each row on its own, the target may apply the projection
    and send `projected_width` elements instead.
    """

    layers: tuple[int, ...]
    width: int
    projected_width: int | None = None
    window: int | None = None  # number of latest states that the method reads; None: all
    sees: int | None = None  # number of latest states that drafts depend on at all; None: all


@value
class StatesFormat:
    """Format of a row."""

    width: int
    dtype: StateDtype

    @property
    def row_bytes(self) -> int:
        if self.dtype is StateDtype.FLOAT8:
            return self.width + SCALE_BYTES
        return 2 * self.width

    @property
    def rows_in_message(self) -> int:
        """Most rows that fit into one message."""
        return max(1, MAX_STATES_BYTES // self.row_bytes)


PROTOCOL_VERSION = 8
MAX_FRAME_BYTES = 16 << 20  # a 1M-token prompt is 4 MiB; a frame of 64 sessions' blocks is far below
MAX_GRAMMAR_BYTES = 1 << 16
PROOF_BYTES = 16  # bytes of an assignment token's proof


class Acceptance(IntEnum):
    """The two exact acceptance rules for draft tokens: Gumbel coupling, and rejection sampling (REJECTION)."""

    COUPLED = 1
    REJECTION = 2


class Finish(IntEnum):
    """Reason why a session ended; NONE if it continues."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class DraftAnswer(IntEnum):
    """Outcome of a request for a block."""

    NOT_ASKED = 0
    GIVEN = 1  # a block arrived in time, or the drafter reported that it has none
    MISSED = 2  # the step ran without the requested block


class Shape(IntEnum):
    """Shapes of a block."""

    CHAIN = 1  # each token follows the previous one
    TREE = 2


class RefusalReason(IntEnum):
    INVALID = 1
    OVERLOADED = 2
    NONFINITE_LOGITS = 3  # any target with the same weights would compute the same


@value
class LiveSession:
    session: str
    attempt: int


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
    """Sampling parameters; the default values sample from the model's own distribution at temperature 1."""

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
    def penalised(self) -> bool:
        additive = self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return additive or self.repetition_penalty != 1.0

    @property
    def filters(self) -> tuple[float, int, float, float]:
        """Parameters that restrict a distribution after penalties were applied."""
        return self.temperature, self.top_k, self.top_p, self.min_p


GREEDY = Sampling(temperature=0.0)


@value
class TokenRules:
    """Token constraints and biases of a request; the default values change nothing."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias added to its logit), each token once
    allowed: tuple[int, ...] = ()  # allowed token ids; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences whose last token is forbidden after the others
    min_len: int = 0  # least length, prompt included, before a stop id is allowed

    @property
    def highest_id(self) -> int:
        biased = max([token for token, _ in self.logit_bias], default=0)
        return max(biased, max(self.allowed, default=0), max([max(word) for word in self.bad_words], default=0))


NO_RULES = TokenRules()


@value
class AssignmentToken:
    """Proof for a target that the session's router assigned the drafter, with the number of the assignment."""

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
    audit: bool = False  # decides an ended request again; yields to every session that is not an audit
    rival: int | None = None  # for an audit of one token: the token whose margin is requested
    token_key: bytes = b""  # to a target: verifies drafters' assignment tokens; empty: any drafter may take part
    assignment_token: AssignmentToken | None = None  # to a drafter: proof to present to the target
    traceparent: str = ""  # W3C trace context of the router's span; empty: not traced
    grammar: str = ""  # grammar of the generated text, in llguidance's notation; empty: any text
    rules: TokenRules = NO_RULES
    scoring: Scoring = NO_SCORING
    priority: int = 0  # sessions with lower numbers are admitted first
    cache_salt: str = ""
    wants_rejected: bool = False  # to a target: whether verdicts include rejected draft tokens
    may_learn: bool = False  # to a drafter: whether it may keep the session's hidden states to learn from

    @property
    def takes_trees(self) -> bool:
        """True if blocks may be trees: the target decides trees by its own draws.

        Rejection sampling decides only chains.
        """
        return self.sampling.greedy or self.acceptance is Acceptance.COUPLED

    @classmethod
    def measured(
        cls, session: str, tokens: tuple[int, ...], max_len: int, draft_tokens: int, sampling: Sampling = GREEDY
    ) -> "Open":
        """Returns the Open of a session that a replica runs itself, to measure or test itself."""
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
    states_from: int | None = None  # first position whose hidden states the drafter lacks, if it reads them
    assignment_token: AssignmentToken | None = None
    states_by: int | None = None  # last position at which they may begin, if earlier ones would be recomputed


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
    """Reports that a session accepts a drafter's blocks far less often than usual."""

    usual: float
    latest: float
    is_resynced: bool


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
    margin: float | None = None  # lead of the committed token over the rival named in the Open, in logits
    scores: tuple[TokenScore, ...] = ()  # scores of the tokens, if the Open requests them
    prompt_scores: tuple[TokenScore, ...] = ()  # scores from the prompt's second token on; only with the first tokens
    prefix_cached: int = 0  # number of the Open's tokens in the target's cache at admission
    rejected: tuple[int, ...] = ()  # to a router that requested it: draft tokens after the accepted ones


@value
class DraftRequest:
    """A target's request to a session's drafter after a prefix, valid until the next request."""

    session: str
    attempt: int
    base_len: int
    prefix_hash: int
    max_tokens: int = MAX_BLOCK_TOKENS
    hold_step: bool = True  # whether the target delays its next step for the block
    least_chance: float = 0.0  # least cumulative acceptance probability of a token worth verifying
    shape: Shape = Shape.CHAIN


@value
class States:
    """The target's hidden states at positions `first`, `first` + 1, ...; the hash covers the last row's token."""

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
    """Acknowledges the states of a session's first `have_len` positions."""

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
    """Announces the sender's planned shutdown: it accepts no new sessions; its existing ones must move elsewhere."""


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
"""Everything due for one peer, in order within each kind."""
