"""Domain messages: what peers say to each other, as frozen values.

`speculation.proto` documents every field; `codec.py` is the only translation. Knows nothing of protobuf.
"""

from collections.abc import Sequence
from enum import IntEnum

from protos.draft_tree import MAX_BLOCK_TOKENS, DraftTree
from protos.states import StateDtype, StatesFormat
from protos.values import value

PROTOCOL_VERSION = 6
MAX_FRAME_BYTES = 16 << 20  # a 1M-token prompt is 4 MiB; a frame of 64 sessions' blocks is far below
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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


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
)
Frame = Sequence[Message]
"""Everything due for one peer, in order within each kind."""
