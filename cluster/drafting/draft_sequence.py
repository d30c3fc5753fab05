"""Drafter-side state of a session: tokens, the target's latest request, and sent blocks."""

from dataclasses import dataclass, field

from cluster.drafting.requests import Proposal, max_draft_tokens
from protos.draft_tree import MAX_BLOCK_TOKENS, NO_TREE, DraftTree
from protos.messages import Attach, DraftRequest, Open, Shape
from protos.prefix import Prefix


@dataclass(eq=False)
class DraftSequence:
    """A drafter's session, from its Open until it is closed or replaced. Lengths are in tokens, prompt included."""

    open: Open
    router: str
    prefix: Prefix
    requested_tokens: int = MAX_BLOCK_TOKENS  # requested draft length
    least_chance: float = 0.0  # minimum cumulative acceptance probability of a token worth verifying
    shape: Shape = Shape.CHAIN  # block shape supported by the target
    attached: bool = False
    served_len: int | None = None  # base length of the latest drafted block
    passed_len: int | None = None  # length at which the target did not wait for a block
    sent_len: int | None = None  # base length of the latest sent block
    block: DraftTree = NO_TREE  # latest sent block
    counted_from: int = 0  # minimum base length of blocks drafted with the current weights
    unverified: DraftTree | None = None  # drafts in the target's current step; None after lookahead from them
    chances: tuple[float, ...] = ()  # cumulative acceptance probabilities of `unverified`, if known
    guesses: dict[tuple[int, int], Proposal] = field(default_factory=dict)  # sent ahead, by address
    first: tuple[int, float] | None = None  # first token of the current block, and its confidence
    decided_s: float | None = None  # arrival of the latest verdict; None after the next request
    step_began_s: float | None = None  # start of the target's current step, if known
    states_len: int | None = None  # end of the held hidden states; None: the method reads none
    states_first: int = 0  # position of the first held hidden state
    states_by: int | None = None  # latest acceptable start of the hidden states, while none are held

    @property
    def target(self) -> str:
        return self.open.target_address

    @property
    def address(self) -> tuple[int, int]:
        """(length, hash) of the current text, which addresses its block."""
        return self.prefix.length, self.prefix.hash

    @property
    def lacks_states(self) -> bool:
        """True if hidden states are missing. The last token's state may be absent, because the target has not read it
        yet.
        """
        return self.states_len is not None and self.states_len < self.prefix.length - 1

    @property
    def lacks_block(self) -> bool:
        """True if no block has been drafted for the current length and the target could use one."""
        length = self.prefix.length
        if self.served_len == length or self.requested_tokens == 0 or not self.attached:
            return False
        return max_draft_tokens(self.open, length) > 0

    @property
    def wants_block(self) -> bool:
        """True if a block should be drafted now."""
        return self.passed_len != self.prefix.length and self.lacks_block and not self.lacks_states

    @property
    def may_go_on(self) -> bool:
        """True if the target could use another block after the pending verdict."""
        return (
            self.requested_tokens > 0
            and max_draft_tokens(self.open, self.prefix.length + 1) > 0
            and not self.lacks_states
        )

    def reset(self, draft_version: int) -> Attach:
        """Discards the record of sent blocks, which may be lost; returns the Attach for the target."""
        self.attached = True
        self.served_len = None
        self.passed_len = None
        self.unverified = None
        self.guesses = {}
        self.decided_s = None
        self.step_began_s = None
        prefix = self.prefix
        first = self.states_len
        by = self.states_by if first != self.states_by else None
        token = self.open.assignment_token
        return Attach(self.open.session, prefix.length, prefix.hash, first, token, by, draft_version)

    def extend(self, tokens: tuple[int, ...], now: float) -> Proposal | None:
        """Appends a verdict's tokens; returns the block already sent for the new text, if any."""
        self.prefix.extend(tokens)
        self.decided_s = now
        self.step_began_s = None
        self.unverified = None
        self.first = None
        hit = self.guesses.get(self.address)
        self.guesses = {}
        return hit

    def apply_request(self, request: DraftRequest, drafts_ahead: bool) -> None:
        """Applies the target's request for the current prefix; `drafts_ahead` enables lookahead."""
        self.requested_tokens = request.max_tokens
        self.least_chance = request.least_chance
        self.shape = request.shape
        decided_s = self.decided_s
        self.decided_s = None
        if decided_s is None:
            return  # a request without a preceding verdict does not mark the start of a step
        is_served = self.served_len == self.prefix.length
        if is_served or not request.hold_step:  # the target starts its step at once
            self.step_began_s = decided_s if self.requested_tokens else None
            if not is_served and drafts_ahead:
                self.unverified = NO_TREE
                self.chances = ()
                self.passed_len = self.prefix.length

    def exchanged(self) -> None:
        """Excludes blocks of the previous weights, including unverified ones, from the acceptance counts."""
        self.counted_from = 1 + max(self.prefix.length, *[length for length, _ in self.guesses], self.sent_len or 0)

    @property
    def is_counted(self) -> bool:
        """True if the block for the current length comes from the current weights."""
        return self.prefix.length >= self.counted_from

    def sent(self, proposal: Proposal) -> None:
        """Records a sent block as the next one to be verified."""
        self.served_len = proposal.base_len
        self.sent_len = proposal.base_len
        self.block = proposal.tree
        self.unverified = proposal.tree
        self.chances = proposal.chances
        self.first = None if proposal.confidence is None else (proposal.tokens[0], proposal.confidence)
