"""Domain messages: what peers say to each other, as frozen values.

`speculation.proto` documents every field; `codec.py` is the only translation. Knows nothing of protobuf.
"""

from collections.abc import Sequence
from enum import IntEnum

from protos.draft_tree import MAX_BLOCK_TOKENS, DraftTree
from protos.scores import NO_SCORING, Scoring, TokenScore
from protos.states import StateDtype, StatesFormat
from protos.values import value

PROTOCOL_VERSION = 7
MAX_FRAME_BYTES = 16 << 20  # a 1M-token prompt is 4 MiB; a frame of 64 sessions' blocks is far below
MAX_GRAMMAR_BYTES = 1 << 16
PROOF_BYTES = 16  # of a ticket


class Acceptance(IntEnum):
    """The two exact ways to accept a draft token."""

    COUPLED = 1
    RATIO = 2


class Finish(IntEnum):
    """Why a session ended, or that it did not."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class DraftAnswer(IntEnum):
    """What came of the block that a drafter was asked for."""

    NOT_ASKED = 0
    GIVEN = 1  # a block was there in time, or the drafter said that it has none
    MISSED = 2  # the step went on without


class Shape(IntEnum):
    """Shapes of a block."""

    CHAIN = 1  # each token follows the one before it
    TREE = 2


class RefusalReason(IntEnum):
    INVALID = 1
    OVERLOADED = 2
    NONFINITE_LOGITS = 3  # any target with the same weights is expected to fail alike


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
    """How tokens are drawn; the neutral values draw from the model's own distribution at temperature 1."""

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
        """What restricts a distribution once penalties are in it."""
        return self.temperature, self.top_k, self.top_p, self.min_p


@value
class TokenRules:
    """Which tokens a request allows, and how much it likes them; the neutral values allow all alike."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # token and what is added to its logit, each token once
    allowed: tuple[int, ...] = ()  # none: all are
    bad_words: tuple[tuple[int, ...], ...] = ()  # of which the last token is forbidden after those before it
    min_len: int = 0  # tokens before which no stop id may come, prompt included

    @property
    def highest_id(self) -> int:
        biased = max([token for token, _ in self.logit_bias], default=0)
        return max(biased, max(self.allowed, default=0), max([max(word) for word in self.bad_words], default=0))


NO_RULES = TokenRules()


@value
class Ticket:
    """What a drafter shows to a target: that its session's router assigned it, as which one of how many so far."""

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
    max_draft_tokens: int
    target_address: str = ""
    audit: bool = False  # decides an ended request again; yields to every session that does not
    rival: int | None = None  # of an audit of one token: whose margin is asked for
    ticket_key: bytes = b""  # to a target: what drafters' tickets are proved by; empty: any drafter may take part
    ticket: Ticket | None = None  # to a drafter: what it is to show
    traceparent: str = ""  # W3C trace context of the router's span; empty: not traced
    grammar: str = ""  # in llguidance's notation: what all that is generated is; empty: any text
    rules: TokenRules = NO_RULES
    scoring: Scoring = NO_SCORING
    priority: int = 0  # lower numbers are admitted first
    cache_salt: str = ""
    wants_rejected: bool = False  # to a target: whether verdicts are to hold the draft tokens that were rejected

    @property
    def takes_trees(self) -> bool:
        """Whether the target's own draws decide, and so about any tree: the ratio rule decides about chains."""
        return self.sampling.greedy or self.acceptance is Acceptance.COUPLED


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
        """Draft tokens in all."""
        return len(self.tree.tokens)


@value
class Attach:
    session: str
    have_len: int
    have_hash: int
    states_from: int | None = None  # first position whose states are lacking, of a drafter that reads them
    ticket: Ticket | None = None
    states_by: int | None = None  # last one that they may begin at where earlier ones would be computed again


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
    """Blocks of a session's drafter are accepted far more seldom than they were."""

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
    margin: float | None = None  # by which the token was ahead of the rival that the Open names
    scores: tuple[TokenScore, ...] = ()  # of the tokens, if the Open asks for them
    prompt_scores: tuple[TokenScore, ...] = ()  # of the prompt's, from the second on; with the first tokens alone
    prefix_cached: int = 0  # tokens of the Open that were in the target's cache when it came
    rejected: tuple[int, ...] = ()  # to a router that asked for it: what the draft had after the accepted tokens


@value
class DraftRequest:
    """What a target wants of a session's drafter after a prefix; it stands until the next one."""

    session: str
    attempt: int
    base_len: int
    prefix_hash: int
    max_tokens: int = MAX_BLOCK_TOKENS
    hold_step: bool = True  # whether the next step is held for the block
    least_chance: float = 0.0  # of a token to be accepted, for which it is worth its verification
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
        """Position after the last row's."""
        return self.first + len(self.rows) // self.format.row_bytes


@value
class StatesAck:
    """A drafter has the states of a session's first `have_len` positions."""

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
    """The sender ends soon, as planned: it takes no new sessions, and those that it has are to be given to others."""


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
