"""The target's scheduler: which sessions it serves, what the next step computes, and what it decided.

The lock-step of `plan` and `apply` is the whole verification loop; between them an engine computes. A block is
verified only at exactly the length and hash it was drafted for. Knows nothing of torch, gRPC or a clock: times
are handed in.
"""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.costs import ForwardCost
from cluster.dispatch import Send, peer_of
from cluster.drafting.requests import max_block_len
from cluster.pacing.acceptance import out_of_step
from cluster.pacing.acceptance_counts import AcceptanceCounts
from cluster.pacing.pacer import Pacer, StepShape
from cluster.pacing.policy import Adaptive, Pacing
from cluster.pacing.step_cost import StepCost
from cluster.page_allocator import PageAllocator, PageCopy
from cluster.routing.circuit_breaker import SilentDrafters
from cluster.verification.admission import Admission
from cluster.verification.block_buffer import BlockBuffer, BlockCounts
from cluster.verification.early_messages import BufferLimits, EarlyMessages
from cluster.verification.sequence import TargetSession
from cluster.verification.step import Outcome, Row, StepPlan
from cluster.verification.step_timing import StepTiming
from protos.messages import (
    Attach,
    Block,
    Close,
    Detach,
    Finish,
    Hello,
    Message,
    NoDraft,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Shape,
    Verdict,
)
from protos.prefix import Prefix


@dataclass(frozen=True, slots=True)
class VerificationLimits:
    """Bounds of one target replica."""

    vocabulary: int  # token ids are below this
    max_context: int
    max_sessions: int  # in the cache at once; further ones queue
    max_step_tokens: int
    pages: int = 4096  # of the cache
    page_size: int = 16  # positions
    alternatives: bool = True  # whether the engine computes them
    max_queued: int = 1024
    buffer: BufferLimits = BufferLimits()  # for blocks that wait for a prefix or for a session


class VerificationScheduler:
    """All sessions of one target replica."""

    def __init__(
        self, limits: VerificationLimits, pacing: Pacing | None = None, step_cost: ForwardCost | None = None
    ) -> None:
        self._limits = limits
        policy = pacing or Adaptive()
        self._pacer = Pacer(policy, step_cost)
        self._silent = SilentDrafters()
        self._timing = StepTiming(policy, self._silent)
        self._pages = PageAllocator(limits.pages, limits.page_size, secrets.token_bytes(16))
        self._admission = Admission(limits.max_sessions, self._pages)
        self._counts = BlockCounts()
        self._unopened = EarlyMessages(limits.buffer, self._counts)
        self._in_step: list[tuple[TargetSession, Row]] = []
        self._step_shape = StepShape()  # of the latest step
        self._free_since = 0.0  # since when sessions could have been in a step and were in none
        self.step_s = 0.0  # in steps
        self.idle_s = 0.0  # in no step, though there were sessions: for want of blocks, as a rule
        self.desyncs = 0  # drafters that were told to begin a session anew because their blocks had become bad

    # ------------------------------------------------------------ what peers say

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Takes a message from a router's or a drafter's stream; returns what is to be sent for it."""
        match message:
            case Block():
                self._block(peer, message, now)
            case Attach():
                return self._attach(peer, message, now)
            case NoDraft():
                self._no_draft(peer, message, now)
            case Open():
                return self._open(peer, message, now)
            case Close():
                self._close(peer, message, now)
            case Detach():
                self._detach(peer, message)
            case Hello():
                self._hello(peer, message, now)
            case _:
                raise AssertionError(f"nobody sends a target a {type(message).__name__}")
        return []

    def gone(self, peer: str, now: float) -> None:
        """A stream broke: a router's sessions are nobody's, a drafter's go on plainly with the blocks that arrived."""
        self._silent.heard(peer)
        for session in self._admission:
            if session.router == peer:
                self._forget(session.open.session)
            elif session.drafter == peer:
                session.drafter = None
        self._unopened.drafter_gone(peer)
        self._admit(now)

    # ------------------------------------------------------------ routers

    def _hello(self, router: str, hello: Hello, now: float) -> None:
        """A router's stream is new: of what its older streams left, only the sessions that it lists stay."""
        wanted = {(item.session, item.attempt) for item in hello.live}
        for session in self._admission:
            if peer_of(session.router) != peer_of(router):
                continue
            session.router = router
            if (session.open.session, session.open.attempt) not in wanted:
                self._forget(session.open.session)
        self._admit(now)

    def _open(self, router: str, request: Open, now: float) -> list[Send]:
        """Serves a session from its ledger; an open one is replaced unless the request is older."""
        if refusal := self._refuse(request):
            return [(router, refusal)]
        name = request.session
        known = self._admission.find(name)
        if known is not None and known.open.attempt >= request.attempt:
            return []
        self._forget(name)
        if not (self._admission.running or self._admission.waiting):
            self._free_since = now
        buffer = BlockBuffer(self._limits.buffer.blocks, self._counts)
        prefix = Prefix(request.hash_key, request.tokens)
        session = TargetSession(request, router, prefix, buffer, waiting_since=now)
        self._admission.waiting[name] = session
        self._admit(now)
        if name in self._admission.waiting:
            self._ask(session)  # so that its drafter has read the prompt when it gets its place
        waiting = self._unopened.take(name)
        if waiting is None:
            return []
        for block in waiting.blocks:
            self._block(waiting.drafter, block, now)
        return self._attach(waiting.drafter, waiting.attach, now) if waiting.attach else []

    def _close(self, router: str, close: Close, now: float) -> None:
        """Forgets a session; an unknown one, another router's, or a newer attempt is left alone."""
        known = self._admission.find(close.session)
        if known is not None and known.router == router and known.open.attempt <= close.attempt:
            self._forget(close.session)
            self._admit(now)

    # ------------------------------------------------------------ drafters

    def _attach(self, drafter: str, attach: Attach, now: float) -> list[Send]:
        """Sends the session's verdicts to this drafter from now on; first what it missed, and what is wanted of it."""
        session = self._admission.find(attach.session)
        if session is None:
            self._unopened.attach(drafter, attach, now)
            return []
        if not session.prefix.matches(attach.have_len, attach.have_hash):
            return [(drafter, Resync(attach.session, len(session.prefix), session.prefix.hash))]
        session.attached(drafter)
        request = (drafter, session.draft_request(self._block_shape(session.open)))
        missed = tuple(session.prefix.tokens[attach.have_len :])
        if not missed:
            return [request]
        verdict = Verdict(attach.session, session.open.attempt, attach.have_len, attach.have_hash, missed, 0, 0)
        return [(drafter, verdict), request]

    def _block(self, drafter: str, block: Block, now: float) -> None:
        """Lets a block wait for its prefix; what can never be verified is dropped and counted."""
        if cause := self._unfit(block):
            self._counts.drop(cause, block)
            return
        session = self._admission.find(block.session)
        if session is None:
            self._unopened.block(drafter, block, now)
            return
        if block.alternatives and self._block_shape(session.open) is Shape.CHAIN:
            self._counts.drop("alternatives", block)
            return
        self._silent.heard(drafter)
        self._note_answer(session, block, len(block.tokens), now)
        session.buffer.place(block, session.open, session.prefix, now)

    def _no_draft(self, drafter: str, no_draft: NoDraft, now: float) -> None:
        """The drafter has no block for this prefix: it is not waited for."""
        self._silent.heard(drafter)
        session = self._admission.find(no_draft.session)
        if session is not None and session.prefix.matches(no_draft.base_len, no_draft.prefix_hash):
            session.no_draft_len = no_draft.base_len
            session.has_answered = True
            if not any(taken is session for taken, _ in self._in_step):  # else it need not have been in a hurry
                self._note_answer(session, no_draft, 1, now)  # it takes as long as one token

    def _detach(self, drafter: str, detach: Detach) -> None:
        """The drafter has left the session, which goes on plainly; blocks that arrived stay good."""
        self._unopened.detach(drafter, detach.session)
        session = self._admission.find(detach.session)
        if session is not None and session.drafter == drafter:
            session.drafter = None

    # ------------------------------------------------------------ the step

    def plan(self, now: float) -> StepPlan | None:
        """What to compute now, or None when nothing is due (see `next_due`)."""
        assert not self._in_step, "a step is planned while another is under way"
        self._unopened.expire(now)
        copies: list[PageCopy] = []
        dues, start = self._timing.dues(self._admission.running, self._pacer.load)
        if start <= now:
            copies = self._fill_step(dues, now)
        closes, opens = self._admission.take_changes()
        if not (self._in_step or opens or closes):
            return None
        self.idle_s += now - self._free_since
        return StepPlan(closes, opens, tuple(row for _, row in self._in_step), tuple(copies))

    def next_due(self) -> float | None:
        """When a step or an expiry will be due if nothing else happens; None while nothing could be."""
        admitted = self._admission.running
        dues = [self._timing.dues(admitted, self._pacer.load)[1]] if admitted else []
        expiry = self._unopened.next_expiry()
        return min(dues if expiry is None else [*dues, expiry], default=None)

    def apply(self, outcomes: Sequence[Outcome], seconds: float, now: float) -> list[Send]:
        """Turns what the engine computed into verdicts, for the router and for the drafter."""
        decided = {outcome.session: outcome for outcome in outcomes}
        to_drafters: list[Send] = []
        to_routers: list[Send] = []
        for session, row in self._in_step:
            if self._admission.running.get(row.session) is not session:
                continue  # closed or replaced while the engine computed
            session.cached_len = row.start + len(row.tokens)
            session.waiting_since = now
            # Before the verdict: a session may end with it, and what it was fed stays useful.
            self._pages.publish(row.session, session.prefix.tokens, min(session.cached_len, session.prefix.length))
            if row.decide:
                news, verdict = self._decide(session, row, decided[row.session], now)
                to_drafters += news
                to_routers.append(verdict)
            if self._admission.running.get(row.session) is session:
                self._pages.truncate(row.session, session.cached_len)
        self._silent.missed({drafter for session, _ in self._in_step if (drafter := session.missed_by) is not None})
        self._pacer.step_made(self._step_shape, sum(outcome.accepted + 1 for outcome in outcomes), seconds, now)
        self._in_step = []
        self.step_s += seconds
        self._free_since = now
        self._admit(now)
        if self.is_idle:
            self._pages.check()
        return [*to_drafters, *to_routers]  # a round waits for its drafter, not for its router

    # ------------------------------------------------------------ inspection

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all is held: no session, no waiting block, nothing due to the engine."""
        return self._admission.is_empty and not self._unopened and not self._in_step

    def load(self) -> dict[str, float]:
        """Sessions in the cache and in the queue, for autoscaling."""
        return {"sessions": float(len(self._admission.running)), "queued": float(len(self._admission.waiting))}

    @property
    def dropped(self) -> Counter[str]:
        """Blocks that were not verified, by cause."""
        return self._counts.dropped

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens, alternatives among them, that verdicts took over from blocks."""
        return self._counts.accepted_tokens

    @property
    def wasted_tokens(self) -> int:
        """Draft tokens, alternatives among them, that came in well-formed blocks and that no verdict took over.

        They were rejected, or never verified: because fewer tokens paid by then, because their block was dropped or
        replaced by a better version, because the target had decided them itself when a late block came, or because
        their session ended. Those whose verdict is still to come are not counted yet.
        """
        return self._counts.wasted_tokens

    @property
    def rebased(self) -> int:
        """Blocks that came late and were verified from where the target had got to."""
        return self._counts.rebased

    @property
    def preempted(self) -> int:
        """Times that a session lost its pages to older ones."""
        return self._admission.preempted

    @property
    def pages(self) -> dict[str, int]:
        """Of the cache: `total`, and those `held` by sessions now; the others are free or may be evicted."""
        return {"total": self._limits.pages, "held": self._limits.pages - self._pages.available}

    @property
    def acceptance(self) -> AcceptanceCounts:
        """Of all blocks since the beginning, by position."""
        return self._pacer.acceptance

    @property
    def speculation(self) -> dict[str, float]:
        """What pacing goes by: plain tokens a second, the gain over them, and whether drafts are asked for."""
        load = self._pacer.load
        return {"plain_rate": load.plain_rate, "gain": load.gain, "on": float(load.speculates)}

    @property
    def step_cost(self) -> StepCost:
        """What steps cost by now."""
        return self._pacer.load.step

    @property
    def is_drafted_for(self) -> bool:
        """Whether blocks were wanted for the latest step: then drafters, where there are any, were at work."""
        return self._step_shape.is_drafted_for

    # ------------------------------------------------------------ helpers

    def _refuse(self, request: Open) -> Refusal | None:
        limits = self._limits
        reason = RefusalReason.INVALID
        why = ""
        if max(request.tokens) >= limits.vocabulary:
            why = f"token id {max(request.tokens)} is outside the vocabulary of {limits.vocabulary}"
        elif request.max_len > limits.max_context:
            why = f"max_len is {request.max_len}, the context holds {limits.max_context} tokens"
        elif self._pages.pages_for(request.max_len) > limits.pages:
            why = f"max_len is {request.max_len}, the cache holds {limits.pages * limits.page_size} tokens"
        elif len(self._admission.waiting) >= limits.max_queued:
            reason = RefusalReason.OVERLOADED
            why = f"{len(self._admission.waiting)} sessions are queued already"
        return Refusal(request.session, request.attempt, reason, why) if why else None

    def _unfit(self, block: Block) -> str | None:
        rows = block.draft_probs.token_ids if block.draft_probs is not None else ()
        drafted = (*block.tokens, *block.alternatives)
        if max(drafted) >= self._limits.vocabulary or (rows and max(map(max, rows)) >= self._limits.vocabulary):
            return "out_of_vocabulary"
        if block.base_len + block.size > self._limits.max_context:
            return "beyond_context"
        return None

    def _block_shape(self, request: Open) -> Shape:
        """What blocks for a session may look like."""
        return Shape.TREE if self._limits.alternatives and request.may_branch else Shape.CHAIN

    def _note_answer(self, session: TargetSession, answer: Block | NoDraft, tokens: int, now: float) -> None:
        """How long it took; not of a block drafted ahead, nor of the first, before which a prompt was read."""
        session.has_answered = True
        is_read = session.is_read
        session.is_read = True
        delay_s = session.delay_of(answer, now)
        if delay_s is not None and is_read:
            session.stats = session.stats.after_arrival(delay_s)
            self._pacer.block_arrived(tokens, delay_s)

    def _forget(self, name: str) -> None:
        self._unopened.ended(name)
        if (session := self._admission.find(name)) is not None:
            session.buffer.leave()
        self._admission.forget(name)

    def _admit(self, now: float) -> None:
        for session in self._admission.admit():
            session.waiting_since = now
            self._ask(session)

    def _fill_step(self, dues: Mapping[str, float], now: float) -> list[PageCopy]:
        """Takes the sessions that are due into the step, longest unserved first, up to the token budget."""
        budget = self._limits.max_step_tokens
        copies: list[PageCopy] = []
        in_step: set[str] = set()
        for name in list(self._admission.order):
            session = self._admission.running.get(name)  # None: preempted by one before it
            if session is None or budget <= 0 or dues[name] > now:
                continue
            row = session.row(budget)
            reserved = self._admission.reserve(session, row.start, row.start + len(row.tokens), in_step)
            if reserved is None:
                continue
            copies += reserved
            budget -= len(row.tokens)
            in_step.add(name)
            self._in_step.append((session, row.in_pages(self._pages.table(name))))
            self._admission.order.remove(name)
            self._admission.order.append(name)
        self._step_shape = self._shape()
        return copies

    def _shape(self) -> StepShape:
        """Of the step that is about to be made, for pacing to learn from its time."""
        return StepShape(
            rows=len(self._in_step),
            tokens=sum(len(row.tokens) for _, row in self._in_step),
            decoding=sum(session.is_decoding for session in self._admission.running.values()),
            decides_all=all(row.decide and session.is_decoding for session, row in self._in_step),
            is_drafted_for=any(session.asked for session, _ in self._in_step),
            is_open_to_drafts=any(session.open.max_draft_tokens for session, _ in self._in_step),
        )

    def _decide(self, session: TargetSession, row: Row, outcome: Outcome, now: float) -> tuple[list[Send], Send]:
        """What its drafter and its router are told."""
        if row.draft_len > 0 or (session.has_no_draft and session.asked):
            room = max_block_len(session.open, session.prefix.length)
            self._pacer.block_verified(session.asked, room, row.drafted, outcome.accepted)
        decision = session.decide(row, outcome, now)
        self._ask(session)
        verdict = Verdict(
            session.open.session,
            session.open.attempt,
            decision.base_len,
            decision.base_hash,
            decision.tokens,
            decision.accepted,
            row.drafted,
            decision.finish,
            session.answer,
        )
        sends: list[Send] = []
        if session.drafter is not None:
            news = session.for_drafter(verdict, self._block_shape(session.open))
            sends += [(session.drafter, message) for message in news]
            sends += self._alarm(session, session.drafter)
        if decision.finish is not Finish.NONE:
            self._forget(session.open.session)
        return sends, (session.router, verdict)

    def _ask(self, session: TargetSession) -> None:
        """Decides how long a block the drafter is asked for next."""
        limit = session.open.max_draft_tokens - session.uncached_accepted  # so that a row never has more tokens
        if limit > 0:
            sessions = max(1, len(self._admission.running))
            session.drafting, session.stats = self._pacer.decide(session.stats, limit, sessions)

    def _alarm(self, session: TargetSession, drafter: str) -> list[Send]:
        """Has a drafter begin the session anew whose blocks were good and are all rejected now."""
        if not out_of_step(session.stats):
            return []
        self.desyncs += 1
        session.stats = session.stats.after_alarm()
        session.drafter = None
        return [(drafter, Resync(session.open.session, len(session.prefix), session.prefix.hash))]
