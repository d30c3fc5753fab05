"""Target-side state of a session: committed tokens, waiting blocks, and the next row."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.draft_quality import CollapseWatch
from cluster.page_allocator import SlotMove
from cluster.speculation.controller import DraftingDecision
from cluster.speculation.estimators import DraftValue
from cluster.trust import is_valid
from cluster.verification.block_buffer import BlockBuffer
from cluster.verification.step import Outcome, Row
from protos.draft_tree import NO_TREE, DraftTree
from protos.frozen import value
from protos.messages import AssignmentToken, Block, DraftAnswer, DraftRequest, Finish, NoDraft, Open, Shape, Verdict
from protos.prefix import Prefix

# Maximum tokens per step in audits and for scored prompts. Audit steps must be short, because a request that arrives
# during a step waits for it to end. Scored rows must be short, because all their logits are in memory at once.
AUDIT_STEP_TOKENS = 64


@value
class Decision:
    """Result of a step for one session."""

    base_len: int  # number of tokens before the committed ones
    base_hash: int
    tokens: tuple[int, ...]
    accepted: int  # number of accepted draft tokens
    finish: Finish
    requested: int  # draft length requested for the row
    answer: DraftAnswer  # outcome of that request
    had_no_draft: bool  # True if the drafter had no block although it had received all hidden states
    has_next_block: bool  # True if the block after the committed tokens has already arrived


@dataclass(eq=False, slots=True)
class StateFeed:
    """Progress of sending a session's hidden states to a drafter. Values are positions."""

    drafter: str
    sent: int
    acked: int  # position after the last acknowledged state
    begin_by: int = 0  # latest acceptable start of the feed; at most `sent`: the start is fixed
    tries: int = 0  # failed attempts to send readable states, if pages keep none

    def mark_sent(self, end: int) -> None:
        self.sent = end
        self.begin_by = end
        self.tries = 0

    def begin(self, first: int) -> None:
        """Starts the feed at position `first`; never sends earlier states."""
        assert self.sent <= first <= self.begin_by, "`first` is outside the range that the drafter accepts"
        self.sent = first
        self.acked = first


@dataclass(eq=False, slots=True)
class CacheState:
    """State of a session's cache in the engine."""

    length: int = 0  # number of valid cached tokens
    initial: int = 0  # number of tokens already cached at admission
    is_open: bool = False  # True once the session is queued for opening in the engine
    displaced_from: int | None = None  # first position out of order before pending moves; None: all in order

    def enter(self, length: int) -> None:
        """Records admission, with `length` tokens already cached."""
        self.length = length
        if not self.is_open:  # a preempted session finds its own pages
            self.initial = length

    def fed(self, row: Row) -> None:
        """Records a computed row. For an engine with its own pages, the row's start reveals the cached tokens."""
        if row.start > self.length == 0:
            self.initial = row.start
        self.length = row.start + len(row.tokens)
        self.displaced_from = None  # the step began with the pending moves

    def moves(self, row: Row, path: Sequence[int], page_size: int) -> list[SlotMove]:
        """Returns the slot moves that bring a row's accepted nodes into order.

        Before these moves, the cache is in order only up to `row.base_len`.
        """
        moves = row.moves_along(path, page_size)
        self.displaced_from = row.base_len if moves else None
        return moves


@dataclass(eq=False, slots=True)
class DrafterAccess:
    """Checks drafters' assignment tokens for a session."""

    open: Open
    replaced: frozenset[str] = frozenset()  # earlier drafters, whose messages may still arrive
    _token: AssignmentToken | None = None  # token of the latest assignment
    _holder: str | None = None  # drafter that presented `_token`

    def admit(self, drafter: str, token: AssignmentToken | None) -> bool:
        """Returns True if the drafter may draft; a valid token excludes drafters with earlier tokens."""
        key = self.open.token_key
        if not key:
            return not self.open.audit
        if token is None or not is_valid(token, key, self.open.session):
            return False
        if self._token is not None and token.assignment < self._token.assignment:
            return False
        self._token = token
        self.replaced = self.drafters
        self._holder = drafter
        return True

    @property
    def drafters(self) -> frozenset[str]:
        """All drafters that have presented a valid assignment token."""
        return self.replaced if self._holder is None else self.replaced | {self._holder}

    def admits(self, drafter: str) -> bool:
        """Returns True if the target accepts messages from this drafter."""
        return self._holder == drafter if self.open.token_key else not self.open.audit


@dataclass(eq=False, slots=True)
class DraftExchange:
    """State of the exchange with a session's drafter."""

    request: DraftingDecision = DraftingDecision()  # current draft request
    sent_len: int = 0  # number of tokens sent to the drafter so far
    is_paused: bool = False  # True if the latest sent request was for 0 tokens
    has_answered: bool = False  # True if the drafter has answered since the latest verdict
    no_draft_len: int = -1  # text length of the latest NoDraft

    def send(self, length: int) -> None:
        """Records that tokens up to `length` and the current request are sent."""
        self.sent_len = length
        self.is_paused = not self.request.tokens

    def no_draft(self, length: int) -> None:
        """Records that the drafter has no block after `length` tokens."""
        self.no_draft_len = length
        self.has_answered = True


@dataclass(eq=False, slots=True)
class TargetSequence:
    """A target's session, from its Open until it ends or is replaced."""

    open: Open
    router: str
    prefix: Prefix
    buffer: BlockBuffer
    access: DrafterAccess
    shape: Shape = Shape.CHAIN  # block shape accepted for the session
    opened_s: float = 0.0
    waiting_since: float = 0.0  # time since which the session could join a step
    cache: CacheState = field(default_factory=CacheState)
    drafter: str | None = None
    exchange: DraftExchange = field(default_factory=DraftExchange)
    drafts: DraftValue = field(default_factory=DraftValue)  # value of the drafter's blocks
    committed_at: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=8)
    )  # recent (length, time) pairs
    in_step: bool = False  # True if it is part of the current step
    row_requested: int = 0  # draft length requested for the latest row
    answer: DraftAnswer = DraftAnswer.NOT_ASKED  # outcome of that request
    watch: CollapseWatch = field(default_factory=CollapseWatch)  # updated by the `DraftQualityMonitor`
    feed: StateFeed | None = None  # hidden-state feed of the latest drafter; updated by `HiddenStateSender`
    stops: frozenset[int] = field(init=False)  # tokens that end the session
    may_share: bool = field(init=False)  # True if the session may reuse cached pages of other sessions

    def __post_init__(self) -> None:
        self.stops = frozenset(self.open.stop_ids)
        # Audits must not, because they check the correctness of computed pages. Prompt scores require computation of
        # the whole prompt.
        self.may_share = not self.open.audit and self.open.scoring.prompt_top is None

    @property
    def live_feed(self) -> StateFeed | None:
        """The hidden-state feed, or None if its drafter has left."""
        return self.feed if self.feed is not None and self.feed.drafter == self.drafter else None

    @property
    def requested_tokens(self) -> int:
        """Draft length of the current request."""
        return self.exchange.request.tokens

    @property
    def is_decoding(self) -> bool:
        """True if the session is past its prompt."""
        return self.prefix.length - self.cache.length <= 1

    @property
    def awaited_drafter(self) -> str | None:
        """The drafter expected to provide a block for the next row; None if no block is expected."""
        return self.drafter if self._wants_block else None

    @property
    def _wants_block(self) -> bool:
        length = self.prefix.length
        exchange = self.exchange
        if exchange.request.tokens == 0 or exchange.no_draft_len == length:
            return False
        return length + 1 < self.open.max_len and length - self.cache.length <= 1

    @property
    def is_drafted_for(self) -> bool:
        """True if a drafter that is not silent drafts for the latest row."""
        return self.row_requested > 0 and self.drafter is not None and not self.drafts.is_silent

    @property
    def has_no_draft(self) -> bool:
        """True if the drafter has reported that it has no block for the next row."""
        return self.exchange.no_draft_len == self.prefix.length

    @property
    def has_confirmed_no_draft(self) -> bool:
        """True if the drafter has no block for the next row although it has received all hidden states."""
        feed = self.live_feed
        return self.has_no_draft and (feed is None or feed.acked >= self.prefix.length - 1)

    def delay_of(self, answer: Block | NoDraft, now: float) -> float | None:
        """Returns the time from the verdict to the answer, in seconds; None for lookahead blocks."""
        if not self.prefix.matches(answer.base_len, answer.prefix_hash):
            return None
        for length, committed_s in reversed(self.committed_at):
            if length == answer.base_len:
                return now - committed_s
        return None

    def attach(self, drafter: str) -> None:
        """Attaches a drafter that will receive the missing tokens and the current request."""
        if drafter != self.drafter:
            self.drafts = DraftValue(is_attached=True)
            self.watch.bad_run = 0
        self.drafter = drafter
        self.exchange.send(self.prefix.length)

    def detach(self) -> None:
        """Detaches the drafter; the session continues without speculation."""
        self.drafter = None
        self.drafts = DraftValue()

    def draft_request(self) -> DraftRequest:
        """Returns the draft request after the committed tokens."""
        request = self.exchange.request
        return DraftRequest(
            self.open.session,
            self.open.attempt,
            self.prefix.length,
            self.prefix.hash,
            request.tokens,
            request.hold_step,
            request.least_chance,
            self.shape,
        )

    def for_drafter(self, verdict: Verdict) -> list[Verdict | DraftRequest]:
        """Returns the messages for the drafter: all unsent tokens and the next request; none while paused."""
        is_over = verdict.finish is not Finish.NONE
        exchange = self.exchange
        if exchange.is_paused and not exchange.request.tokens and not is_over:
            return []
        unsent = self._unsent(verdict)
        exchange.send(self.prefix.length)
        return [unsent] if is_over else [unsent, self.draft_request()]

    def for_router(self, verdict: Verdict, row: Row, outcome: Outcome) -> Verdict:
        """Returns the verdict with the router-only fields that the Open requests."""
        rejected = self._rejected(verdict, row)
        if not (rejected or outcome.scores or outcome.prompt_scores):
            return verdict
        scores = outcome.scores[: len(verdict.tokens)]
        return replace(verdict, rejected=rejected, scores=scores, prompt_scores=outcome.prompt_scores)

    def _rejected(self, verdict: Verdict, row: Row) -> tuple[int, ...]:
        """Returns the draft tokens of a verified row after the accepted ones."""
        is_cut = verdict.accepted == len(verdict.tokens)  # the session ended within the accepted tokens
        if is_cut or not self.open.wants_rejected:
            return ()
        return row.draft.after(verdict.tokens[: verdict.accepted]).main_path

    def _unsent(self, verdict: Verdict) -> Verdict:
        """Returns the verdict extended by all earlier tokens not yet sent to the drafter."""
        sent_len = self.exchange.sent_len
        if sent_len == verdict.base_len:
            return verdict
        prefix_hash = self.prefix.hash_at(sent_len)
        assert prefix_hash is not None, "sent tokens exceed committed tokens"
        tokens = tuple(self.prefix.tokens[sent_len:])
        return replace(verdict, base_len=sent_len, prefix_hash=prefix_hash, tokens=tokens, accepted=0, drafted=0)

    def next_tokens(self, budget: int) -> tuple[tuple[int, ...], DraftTree, bool]:
        """Returns the tokens of the next row, at most `budget`, the draft at their end, and True if the row decides.

        Never splits a block.
        """
        budget = budget if self.may_share else min(budget, AUDIT_STEP_TOKENS)
        tail = tuple(self.prefix.tokens[self.cache.length :])
        left = budget - len(tail)
        if left < 0:
            return tail[:budget], NO_TREE, False
        # The current request may be shorter than the request for the block. The cut depends only on the request,
        # because under rejection sampling it must not depend on the tokens.
        block = self._usable_block()
        if block is None:
            return tail, NO_TREE, True
        draft = block.tree.first(self.requested_tokens)
        if len(draft.tokens) > left:
            draft = NO_TREE
        return tail + draft.tokens, draft, True

    def answer_for(self, row: Row) -> DraftAnswer:
        """Returns the outcome of the draft request for a new row; a block too long for the row counts as GIVEN."""
        if not row.decide:
            return DraftAnswer.NOT_ASKED
        if row.draft.tokens or self.has_no_draft or self._usable_block() is not None:
            return DraftAnswer.GIVEN
        if self._wants_block and (self.exchange.request.hold_step or self.drafts.is_silent):
            return DraftAnswer.MISSED  # also if the assigned drafter has not attached
        return DraftAnswer.NOT_ASKED

    def join_step(self, row: Row) -> None:
        """Records that the session joins the current step with this row."""
        self.in_step = True
        self.row_requested = self.requested_tokens
        self.answer = self.answer_for(row)

    def _usable_block(self) -> Block | None:
        return self.buffer.ready if self.exchange.request.tokens else None

    def commit(self, row: Row, outcome: Outcome) -> Decision:
        """Commits the engine's outcome for `row`: tokens, cache and waiting blocks. `learn` must follow."""
        request = self.open
        prefix = self.prefix
        base_len = prefix.length
        base_hash = prefix.hash
        verified = len(outcome.path)
        cache = self.cache
        if cache.length != row.start:
            cache.fed(row)
        had_no_draft = self.exchange.no_draft_len == base_len and self.has_confirmed_no_draft
        tokens, accepted, finish = outcome.tokens_of(row), verified, Finish.NONE
        if base_len + len(tokens) >= request.max_len or not self.stops.isdisjoint(tokens):
            tokens, accepted, finish = cut_at_end(tokens, verified, base_len, request.max_len, self.stops)
        if row.draft.tokens:
            self.buffer.take()
        prefix.extend(tokens)
        cache.length = base_len + min(verified, len(tokens))  # the last token has not been fed
        cache.displaced_from = None  # the step began with the pending moves
        has_next_block = self.buffer.advance_to(prefix, accepted)
        return Decision(
            base_len,
            base_hash,
            tokens,
            accepted,
            finish,
            self.row_requested,
            self.answer,
            had_no_draft,
            has_next_block,
        )

    def drop_draft(self) -> None:
        """Discards a draft that was verified with NaN or infinite logits; the next row has none.

        A draft token that would have been rejected may be their cause, and attention spreads NaN to the whole row.
        """
        self.buffer.take()
        self.cache.displaced_from = None  # the step began with the pending moves
        self.exchange.no_draft(self.prefix.length)

    def learn(self, row: Row, outcome: Outcome, decision: Decision, now: float) -> None:
        """Updates the value of the session's drafts after a commit at time `now`."""
        exchange = self.exchange
        is_asked = decision.requested > 0 and row.known == 1
        is_missed = is_asked and self.drafter is not None and not (exchange.has_answered or row.drafted)
        exchange.has_answered = False
        self.committed_at.append((decision.base_len + len(decision.tokens), now))
        self.drafts.round_ended(len(outcome.path), is_missed, decision.has_next_block)


def cut_at_end(
    tokens: tuple[int, ...], accepted: int, base_len: int, max_len: int, stop_ids: frozenset[int]
) -> tuple[tuple[int, ...], int, Finish]:
    """Truncates committed tokens at the session's end: after the first stop id, or at the length limit.

    Returns the remaining tokens, the number of draft tokens among them, and the reason for the end.
    """
    room = max_len - base_len
    for count, token in enumerate(tokens, 1):
        if token in stop_ids:
            return tokens[:count], min(accepted, count), Finish.STOP
        if count >= room:
            return tokens[:count], min(accepted, count), Finish.LENGTH
    return tokens, accepted, Finish.NONE
