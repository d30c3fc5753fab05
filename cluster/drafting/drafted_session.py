"""One session as its drafter has it: tokens, what the target wants, and which blocks were sent."""

from dataclasses import dataclass, field

from cluster.drafting.requests import Proposal, max_block_len
from protos.draft_tree import MAX_BLOCK_TOKENS, NO_TREE, DraftTree
from protos.messages import Attach, DraftRequest, Open, Shape
from protos.prefix import Prefix


@dataclass(eq=False)
class DraftedSession:
    """A session from its Open until it is closed or replaced. Lengths are in tokens, prompt included."""

    open: Open
    router: str
    prefix: Prefix
    asked: int = MAX_BLOCK_TOKENS  # longest block that the target finds worth drafting
    least_chance: float = 0.0  # of a draft token to be accepted, for which it is worth its verification
    shape: Shape = Shape.CHAIN  # that the target can verify
    attached: bool = False
    served_len: int | None = None  # base length of the latest block that was drafted
    passed_len: int | None = None  # length after which the target went on without waiting for a block
    sent_len: int | None = None  # base length of the latest block that was sent
    unverified: DraftTree | None = None  # drafts of the step under way, until something was drafted beyond it
    chances: tuple[float, ...] = ()  # of these drafts, as far as their method gave any
    guesses: dict[tuple[int, int], Proposal] = field(default_factory=dict)  # blocks sent ahead, by length and hash
    first: tuple[int, float] | None = (
        None  # token of the block for the current length, and how sure its method is of it
    )
    decided_s: float | None = None  # when the latest verdict came, until the target has said what it wants after it
    step_began_s: float | None = None  # when the target began the step under way, as far as is known here
    states_len: int | None = None  # end of those whose hidden states are here, of a method that reads them
    states_first: int = 0  # the first of them
    states_by: int | None = None  # position that they may begin at, at the latest, while none are here

    @property
    def target(self) -> str:
        return self.open.target_address

    @property
    def address(self) -> tuple[int, int]:
        """What a block for the current length is addressed by."""
        return self.prefix.length, self.prefix.hash

    @property
    def lacks_states(self) -> bool:
        """Whether hidden states are missing of any token but the last, which the target has not read yet."""
        return self.states_len is not None and self.states_len < self.prefix.length - 1

    @property
    def lacks_block(self) -> bool:
        """Whether none was drafted for the current length, where one could be of use."""
        length = self.prefix.length
        if self.served_len == length or self.asked == 0 or not self.attached:
            return False
        return max_block_len(self.open, length) > 0

    @property
    def wants_block(self) -> bool:
        """Whether one should be drafted now."""
        return self.passed_len != self.prefix.length and self.lacks_block and not self.lacks_states

    @property
    def may_go_on(self) -> bool:
        """Whether a block could be of use after the verdict that is due."""
        return self.asked > 0 and max_block_len(self.open, self.prefix.length + 1) > 0 and not self.lacks_states

    def begin_anew(self) -> Attach:
        """It is attached to its target by the message returned; what was sent before may have been lost."""
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
        return Attach(self.open.session, prefix.length, prefix.hash, first, self.open.ticket, by)

    def extend(self, tokens: tuple[int, ...], now: float) -> Proposal | None:
        """Follows a verdict; returns the block for what comes next if it was sent ahead."""
        self.prefix.extend(tokens)
        self.decided_s = now
        self.step_began_s = None
        self.unverified = None
        self.first = None
        hit = self.guesses.get(self.address)
        self.guesses = {}
        return hit

    def take(self, request: DraftRequest, goes_ahead: bool) -> None:
        """What the target wants after the current prefix; `goes_ahead`: whether drafts are made past its verdicts."""
        self.asked = request.max_tokens
        self.least_chance = request.least_chance
        self.shape = request.shape
        decided_s = self.decided_s
        self.decided_s = None
        if decided_s is None:
            return  # no verdict came before it: no step has begun that it could tell of
        is_served = self.served_len == self.prefix.length
        if is_served or not request.hold_step:  # the target goes on at once, with a block or without
            self.step_began_s = decided_s if self.asked else None
            if not is_served and goes_ahead:
                self.unverified = NO_TREE
                self.chances = ()
                self.passed_len = self.prefix.length

    def sent(self, proposal: Proposal) -> None:
        """This block is the one that the target will verify next."""
        self.served_len = proposal.base_len
        self.sent_len = proposal.base_len
        self.unverified = proposal.tree
        self.chances = proposal.chances
        self.first = None if proposal.confidence is None else (proposal.tokens[0], proposal.confidence)
