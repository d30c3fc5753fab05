"""One session as its target replica has it: decided tokens, waiting blocks, and its next row."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from cluster.pacing.acceptance import SessionStats
from cluster.pacing.policy import DraftingDecision
from cluster.page_allocator import PlaceMove
from cluster.sentinel.collapse import CollapseWatch
from cluster.trust.tickets import is_valid
from cluster.verification.block_buffer import BlockBuffer
from cluster.verification.step import Outcome, Row
from protos.draft_tree import NO_TREE
from protos.messages import Block, DraftAnswer, DraftRequest, Finish, NoDraft, Open, Shape, Ticket, Verdict
from protos.prefix import Prefix
from protos.values import value

# Of a prompt that is audited or scored: a request that comes meanwhile waits for the step, so it is to be a short one;
# and the logits of all of a scored one are held at once.
AUDIT_STEP_TOKENS = 64
MISSED_ROUNDS = 4  # without any block, after which one that was not waited for is missed too


@value
class Decision:
    """What a step decided for a session."""

    base_len: int  # tokens before the decided ones
    base_hash: int
    tokens: tuple[int, ...]
    accepted: int  # of them, from the block
    finish: Finish


@dataclass(eq=False, slots=True)
class StateFeed:
    """How far the hidden states of a session have gone to a drafter that reads them. Lengths are in positions."""

    drafter: str
    sent: int
    acked: int  # that have arrived
    begin_by: int = 0  # position that they may begin at, at the latest; not after `sent`: there is no choice any more
    tries: int = 0  # times that what follows could have been read and did not go out, where pages keep none

    def went_out(self, end: int) -> None:
        self.sent = end
        self.begin_by = end
        self.tries = 0

    def begin(self, first: int) -> None:
        """They may begin there, and what comes before goes to nobody."""
        assert self.sent <= first <= self.begin_by, "the drafter has no use for states from there on"
        self.sent = first
        self.acked = first


@dataclass(eq=False, slots=True)
class TargetSession:
    """A session from its Open until it ends or is replaced."""

    open: Open
    router: str
    prefix: Prefix
    buffer: BlockBuffer
    shape: Shape = Shape.CHAIN  # what blocks may look like
    opened_s: float = 0.0
    cached_len: int = 0  # tokens in the engine's cache that stand
    in_engine: bool = False  # whether the engine has heard of it
    in_step: bool = False  # whether it is in the step under way
    drafter: str | None = None
    sent_len: int = 0  # length that the drafter knows of
    paused: bool = False  # whether it knows that nothing is asked of it
    drafting: DraftingDecision = DraftingDecision()  # what the drafter was asked for
    is_read: bool = False  # whether its drafter has answered at all: before that it had to read the prompt
    has_answered: bool = False  # whether the drafter has answered since the latest verdict, with whatever
    no_draft_len: int = -1  # length after which the drafter has no block to offer
    answer: DraftAnswer = DraftAnswer.NOT_ASKED  # what came of the block that was asked for, for the row made last
    waiting_since: float = 0.0  # when the session could last have gone into a step, had its block been there
    decided_at: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=8))  # latest lengths, and when
    stats: SessionStats = field(default_factory=SessionStats)
    prefix_cached: int = 0  # tokens on pages that were in the cache already when it began
    watch: CollapseWatch = CollapseWatch()
    feed: StateFeed | None = None  # of hidden states, to the drafter that attached last, if it reads them
    ticket: Ticket | None = None  # the latest assignment's that was presented
    presented_by: str | None = None  # the drafter that presented it
    replaced: frozenset[str] = frozenset()  # drafters that presented an earlier one: of theirs something may still come
    displaced_from: int | None = None  # position from which on the cache is in order only once moves are made

    @property
    def live_feed(self) -> StateFeed | None:
        """Unless its drafter has gone."""
        return self.feed if self.feed is not None and self.feed.drafter == self.drafter else None

    @property
    def may_share(self) -> bool:
        """Whether it may begin on pages that others computed.

        An audit is to find out whether they computed them right. For the scores of a prompt all of it is computed.
        """
        return not self.open.audit and self.open.scoring.prompt_top is None

    @property
    def asked(self) -> int:
        """Longest block that the drafter was asked for."""
        return self.drafting.tokens

    @property
    def is_decoding(self) -> bool:
        """Whether it is past its prompt."""
        return self.prefix.length - self.cached_len <= 1

    @property
    def awaited_drafter(self) -> str | None:
        """Who was asked for a block for the next row and has not said that there is none."""
        return self.drafter if self._wants_block else None

    @property
    def _wants_block(self) -> bool:
        length = self.prefix.length
        if self.drafting.tokens == 0 or self.no_draft_len == length:
            return False
        return length + 1 < self.open.max_len and length - self.cached_len <= 1

    @property
    def missed_by(self) -> str | None:
        """The drafter whose block the row made last went without."""
        return self.drafter if self.answer is DraftAnswer.MISSED else None

    @property
    def has_no_draft(self) -> bool:
        """Whether the drafter has said that it has no block for the next row."""
        return self.no_draft_len == self.prefix.length

    @property
    def has_nothing(self) -> bool:
        """The same, and it is not for want of hidden states that are on their way."""
        feed = self.live_feed
        return self.has_no_draft and (feed is None or feed.acked >= self.prefix.length - 1)

    def fed(self, row: Row) -> None:
        """The row was computed: an engine with pages of its own finds only in the step what it had."""
        if row.start > self.cached_len == 0:
            self.prefix_cached = row.start
        self.cached_len = row.start + len(row.tokens)

    def ready_block(self) -> Block | None:
        return self.buffer.ready(self.prefix)

    def delay_of(self, answer: Block | NoDraft, now: float) -> float | None:
        """How long after its verdict it came; None for a block drafted ahead, and for a guess that proved wrong."""
        if not self.prefix.matches(answer.base_len, answer.prefix_hash):
            return None
        for length, decided in reversed(self.decided_at):
            if length == answer.base_len:
                return now - decided
        return None

    def admit(self, drafter: str, ticket: Ticket | None) -> bool:
        """Whether the drafter may take part; a ticket that is valid shuts out whoever presented an earlier one."""
        key = self.open.ticket_key
        if not key:
            return not self.open.audit
        if ticket is None or not is_valid(ticket, key, self.open.session):
            return False
        if self.ticket is not None and ticket.assignment < self.ticket.assignment:
            return False
        self.ticket = ticket
        self.replaced = self.drafters_so_far
        self.presented_by = drafter
        return True

    @property
    def drafters_so_far(self) -> frozenset[str]:
        """All that it was ever assigned to."""
        return self.replaced if self.presented_by is None else self.replaced | {self.presented_by}

    def admits(self, drafter: str) -> bool:
        """Whether what this drafter sends is heard."""
        return self.presented_by == drafter if self.open.ticket_key else not self.open.audit

    def attached(self, drafter: str) -> None:
        """A drafter is told what it missed of the session and what is asked of it."""
        self.drafter = drafter
        self.sent_len = self.prefix.length
        self.is_read = False
        self.paused = not self.drafting.tokens

    def draft_request(self) -> DraftRequest:
        """What is wanted of the drafter after the tokens that are decided now."""
        return DraftRequest(
            self.open.session,
            self.open.attempt,
            self.prefix.length,
            self.prefix.hash,
            self.drafting.tokens,
            self.drafting.hold_step,
            self.drafting.least_chance,
            self.shape,
        )

    def for_drafter(self, verdict: Verdict) -> list[Verdict | DraftRequest]:
        """What the drafter is told: all that it has not heard, and what is wanted next; nothing while paused."""
        is_over = verdict.finish is not Finish.NONE
        if self.paused and not self.drafting.tokens and not is_over:
            return []
        news = self._unsent(verdict)
        self.sent_len = self.prefix.length
        self.paused = not self.drafting.tokens
        return [news] if is_over else [news, self.draft_request()]

    def for_router(self, verdict: Verdict, row: Row, outcome: Outcome) -> Verdict:
        """With what only its router is told, where the Open asks for it."""
        rejected = self._rejected(verdict, row)
        if not (rejected or outcome.scores or outcome.prompt_scores):
            return verdict
        scores = outcome.scores[: len(verdict.tokens)]
        return replace(verdict, rejected=rejected, scores=scores, prompt_scores=outcome.prompt_scores)

    def _rejected(self, verdict: Verdict, row: Row) -> tuple[int, ...]:
        """What the draft had after the accepted tokens, of a row that was verified."""
        is_cut = verdict.accepted == len(verdict.tokens)  # the session ended inside the accepted part
        if is_cut or not self.open.wants_rejected:
            return ()
        return row.draft.after(verdict.tokens[: verdict.accepted]).trunk

    def _unsent(self, verdict: Verdict) -> Verdict:
        """The verdict, with all tokens before it that the drafter has not heard of."""
        sent_len = self.sent_len
        if sent_len == verdict.base_len:
            return verdict
        prefix_hash = self.prefix.hash_at(sent_len)
        assert prefix_hash is not None, "the drafter was told more than was decided"
        tokens = tuple(self.prefix.tokens[sent_len:])
        return replace(verdict, base_len=sent_len, prefix_hash=prefix_hash, tokens=tokens, accepted=0, drafted=0)

    def row(self, budget: int) -> Row:
        """What to feed next, with at most `budget` tokens; a block only as a whole. The pages are left open.

        Notes the drafter's `answer`, which a block too long for the budget is too.
        """
        name = self.open.session
        budget = budget if self.may_share else min(budget, AUDIT_STEP_TOKENS)
        asked = self.drafting.tokens
        tail = tuple(self.prefix.tokens[self.cached_len :])
        left = budget - len(tail)
        self.answer = DraftAnswer.NOT_ASKED
        if left < 0:
            return Row(name, tail[:budget], self.cached_len, decide=False, pages=())
        block = self.ready_block() if asked else None
        if block is not None or self.has_no_draft:
            self.answer = DraftAnswer.GIVEN
        elif self._wants_block and (self.drafting.hold_step or self.stats.missed_rounds >= MISSED_ROUNDS):
            self.answer = DraftAnswer.MISSED  # of a drafter too that the router assigned and that has not attached
        # By now fewer tokens may pay than when it was drafted; under ratio that may not depend on which they are.
        draft = block.tree.first(asked) if block is not None else NO_TREE
        if len(draft.tokens) > left:
            draft = NO_TREE
        return Row(name, tail + draft.tokens, self.cached_len, decide=True, pages=(), draft=draft)

    def decide(self, row: Row, outcome: Outcome, now: float) -> Decision:
        """Takes over what the engine computed for `row`."""
        request = self.open
        prefix = self.prefix
        stats = self.stats
        asked = self.drafting.tokens
        verified = outcome.accepted
        base_len = prefix.length
        base_hash = prefix.hash
        raw = outcome.tokens_of(row)
        tokens, accepted, finish = settle(raw, verified, base_len, request.max_len, request.stop_ids)
        if drafted := row.drafted:
            self.buffer.take(base_len, base_hash)
            stats.block_verified(asked, drafted, outcome.path)
        elif asked and self.has_nothing:
            stats.nothing_drafted(asked)
        elif row.known == 1 and self.drafter is not None and not self.has_answered:
            stats.plain_round()
        self.has_answered = False
        prefix.extend(tokens)
        self.decided_at.append((prefix.length, now))
        self.cached_len = base_len + min(verified, len(tokens))  # the last token was not fed
        hit = self.buffer.move_on(prefix, accepted, now)
        if asked:
            stats.verdict_sent(hit)
        return Decision(base_len, base_hash, tokens, accepted, finish)

    def moves(self, row: Row, path: Sequence[int], page_size: int) -> list[PlaceMove]:
        """What brings the accepted nodes of a row into order; until it is done, the cache ends before them."""
        moves = row.kept(path, page_size)
        self.displaced_from = row.base_len if moves else None
        return moves


def settle(
    tokens: Sequence[int], accepted: int, base_len: int, max_len: int, stop_ids: Collection[int]
) -> tuple[tuple[int, ...], int, Finish]:
    """Cuts decided tokens where the session ends: after the first stop id, or at the length limit.

    Returns the tokens that stand, how many of them were drafted, and whether the session ended.
    """
    room = max_len - base_len
    for count, token in enumerate(tokens, 1):
        if token in stop_ids:
            return tuple(tokens[:count]), min(accepted, count), Finish.STOP
        if count >= room:
            return tuple(tokens[:count]), min(accepted, count), Finish.LENGTH
    return tuple(tokens), accepted, Finish.NONE
