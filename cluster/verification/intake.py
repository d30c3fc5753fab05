"""A target's handling of messages: sessions open and close, drafters attach and leave, blocks arrive.

All of it takes effect between two steps; `scheduler.py` makes the steps.
"""

from cluster.envelope import Send, peer_of
from cluster.speculation.circuit_breaker import SilentDrafters
from cluster.speculation.pacer import Pacer
from cluster.trust.refusals import Refusals, not_permitted
from cluster.verification.admission import Admission, Departure
from cluster.verification.block_buffer import BlockBuffer, BlockCounts
from cluster.verification.draft_quality import AcceptanceSentinel
from cluster.verification.hidden_state_sender import StateFeeds
from cluster.verification.limits import VerificationLimits
from cluster.verification.orphan_buffer import EarlyMessages
from cluster.verification.sequence import TargetSession
from protos.messages import (
    Attach,
    Block,
    Close,
    Detach,
    Hello,
    Message,
    NoDraft,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Shape,
    StatesAck,
    Verdict,
)
from protos.prefix import Prefix


class Intake:
    """Applies peers' messages to the sessions of one target replica."""

    def __init__(
        self,
        limits: VerificationLimits,
        admission: Admission,
        pacer: Pacer,
        silent: SilentDrafters,
        counts: BlockCounts,
        sentinel: AcceptanceSentinel,
        refusals: Refusals,
    ) -> None:
        self._limits = limits
        self._admission = admission
        self._pacer = pacer
        self._silent = silent
        self._counts = counts
        self._sentinel = sentinel
        self._refusals = refusals
        self.feeds = StateFeeds(limits.states, admission, limits.keeps_states)
        self.departure = Departure(admission, self.forget)
        self._early = EarlyMessages(limits.buffer, counts)
        self.unasked = 0  # blocks for sessions that are not open, or assigned to another drafter

    # ------------------------------------------------------------ messages from peers

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Handles a message from a router's or a drafter's stream; returns the messages to send in response."""
        match message:
            case Block():
                self._block(peer, message, now)
            case Attach():
                return self._attach(peer, message, now)
            case StatesAck():
                self.feeds.acked(peer, message)
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
        """Handles a broken stream.

        A router's sessions are forgotten. A drafter's sessions continue without speculation, after the blocks that
        arrived.
        """
        self._silent.heard(peer)
        for session in self._admission:
            if session.router == peer:
                self.forget(session.open.session)
            elif session.drafter == peer:
                session.drafter = None
        self._early.drafter_gone(peer)
        self.admit(now)

    # ------------------------------------------------------------ routers

    def _hello(self, router: str, hello: Hello, now: float) -> None:
        """Handles a router's new stream: drops the sessions of its earlier streams that the Hello does not list."""
        wanted = {(item.session, item.attempt) for item in hello.live}
        peer = peer_of(router)
        for session in self._admission:
            if peer_of(session.router) != peer:
                continue
            session.router = router
            if (session.open.session, session.open.attempt) not in wanted:
                self.forget(session.open.session)
        self.admit(now)

    def _open(self, router: str, request: Open, now: float) -> list[Send]:
        """Serves a session from its ledger; replaces an open one unless the request is older or from another router."""
        name = request.session
        known = self._admission.find(name)
        if known is not None and known.router != router:
            self._refusals.note(router, "an Open of another router's session", name)
            return [(router, not_permitted(request))]
        if refused := self.departure.refuse(router, request):
            return refused
        if refusal := self._refuse(request):
            return [(router, refusal)]
        if known is not None and known.open.attempt >= request.attempt:
            return []
        self.forget(name)
        sends = [] if request.audit else self._end_audits()
        buffer = BlockBuffer(self._limits.buffer.blocks, self._counts)
        prefix = Prefix(request.hash_key, request.tokens)
        shape = self._block_shape(request)
        session = TargetSession(request, router, prefix, buffer, shape, opened_s=now, waiting_since=now)
        if known is not None:
            session.replaced = known.drafters_so_far
        self._admission.waiting[name] = session
        self.admit(now)
        if name in self._admission.waiting:
            self.ask(session)  # so that its drafter has read the prompt when it is admitted
        for waiting in self._early.take(name):
            if waiting.attach is not None:
                session.admit(waiting.drafter, waiting.attach.ticket)
            for block in waiting.blocks:
                self._block(waiting.drafter, block, now)
            sends += self._attach(waiting.drafter, waiting.attach, now) if waiting.attach is not None else []
        return sends

    def _end_audits(self) -> list[Send]:
        """Ends all audits, of any router, because a request has arrived."""
        audits = [session for session in self._admission if session.open.audit]
        for session in audits:
            self.forget(session.open.session)
        return [(session.router, _no_time_for(session.open)) for session in audits]

    def _close(self, router: str, close: Close, now: float) -> None:
        """Forgets a session, unless it is unknown, another router's, or a newer attempt."""
        known = self._admission.find(close.session)
        if known is not None and known.router == router and known.open.attempt <= close.attempt:
            self.forget(close.session)
            self.admit(now)

    # ------------------------------------------------------------ drafters

    def _attach(self, drafter: str, attach: Attach, now: float) -> list[Send]:
        """Sends the session's verdicts to this drafter from now on, beginning with what it missed and the current
        request."""
        session = self._admission.find(attach.session)
        if session is None:
            self._early.attach(drafter, attach, now)
            return []
        if not session.admit(drafter, attach.ticket):
            self._refusals.note(drafter, "an Attach to a session that it was not assigned", attach.session)
            return []
        if not session.prefix.matches(attach.have_len, attach.have_hash):
            return [(drafter, Resync(attach.session, len(session.prefix), session.prefix.hash))]
        session.attached(drafter)
        self._sentinel.attached(session, drafter)
        self.feeds.attached(session, drafter, attach)
        request = (drafter, session.draft_request())
        missed = tuple(session.prefix.tokens[attach.have_len :])
        if not missed:
            return [request]
        verdict = Verdict(attach.session, session.open.attempt, attach.have_len, attach.have_hash, missed, 0, 0)
        return [(drafter, verdict), request]

    def _block(self, drafter: str, block: Block, now: float) -> None:
        """Stores a block until its prefix is decided; drops and counts one that can never be verified."""
        if cause := self._limits.unfit(block):
            self._counts.drop(cause, block)
            return
        session = self._admission.find(block.session)
        if session is None:
            self.unasked += 1
            self._early.block(drafter, block, now)
            return
        if not session.admits(drafter):
            self.unasked += 1
            if drafter not in session.replaced:  # otherwise it was sent before another drafter was assigned
                self._refusals.note(drafter, "a Block for a session that it was not assigned", block.session)
            self._counts.drop("not_assigned", block)
            return
        if session.shape is Shape.CHAIN and not block.tree.is_chain:
            self._counts.drop("tree", block)
            return
        self._silent.heard(drafter)
        self._note_answer(session, block, block.size, now)
        session.buffer.place(block, session.open, session.prefix, now)

    def _no_draft(self, drafter: str, no_draft: NoDraft, now: float) -> None:
        """Records that the drafter has no block for this prefix, so that no step waits for it."""
        session = self._admission.find(no_draft.session)
        if session is None or not session.admits(drafter):
            return
        self._silent.heard(drafter)
        if session.prefix.matches(no_draft.base_len, no_draft.prefix_hash):
            session.no_draft_len = no_draft.base_len
            session.has_answered = True
            if not session.in_step:  # during a step, the answer had time and its delay means nothing
                self._note_answer(session, no_draft, 1, now)  # it takes as long as one token

    def _detach(self, drafter: str, detach: Detach) -> None:
        """Records that the drafter left the session, which goes on without speculation.

        Blocks that arrived stay valid.
        """
        self._early.detach(drafter, detach.session)
        session = self._admission.find(detach.session)
        if session is not None and session.drafter == drafter:
            session.drafter = None

    # ------------------------------------------------------------ sessions

    def forget(self, name: str) -> None:
        self._early.ended(name)
        if (session := self._admission.find(name)) is not None:
            session.buffer.leave()
        self._admission.forget(name)

    def admit(self, now: float) -> None:
        for session in self._admission.admit():
            session.waiting_since = now
            self.ask(session)

    def ask(self, session: TargetSession) -> None:
        """Decides the draft length of the drafter's next request."""
        limit = session.open.max_draft_tokens
        if limit > 0:
            sessions = max(1, len(self._admission.running))
            session.drafting = self._pacer.decide(session.stats, limit, sessions)

    # ------------------------------------------------------------ early messages

    @property
    def is_empty(self) -> bool:
        """True if no message waits for a session that is not open."""
        return not self._early

    def expire(self, now: float) -> None:
        """Drops messages that have waited too long."""
        self._early.expire(now)

    def next_expiry(self) -> float | None:
        """Returns the time at which `expire` will have something to do; None if nothing waits."""
        return self._early.next_expiry()

    # ------------------------------------------------------------ helpers

    def _block_shape(self, request: Open) -> Shape:
        """Returns the shape of blocks that a session accepts."""
        return Shape.TREE if self._limits.trees and request.takes_trees else Shape.CHAIN

    def _refuse(self, request: Open) -> Refusal | None:
        if request.audit and not all(session.open.audit for session in self._admission):
            return _no_time_for(request)
        reason = RefusalReason.INVALID
        why = self._limits.fault_of(request, self._admission.pages.pages_for(request.max_len))
        if not why and len(self._admission.waiting) >= self._limits.max_queued:
            reason = RefusalReason.OVERLOADED
            why = f"{len(self._admission.waiting)} sessions are queued already"
        return Refusal(request.session, request.attempt, reason, why) if why else None

    def _note_answer(self, session: TargetSession, answer: Block | NoDraft, tokens: int, now: float) -> None:
        """Records an answer's delay, unless the block was drafted ahead or is the first, which includes reading the
        prompt."""
        session.has_answered = True
        is_read = session.is_read
        session.is_read = True
        delay_s = session.delay_of(answer, now)
        if delay_s is not None and is_read:
            session.stats.block_arrived(delay_s)
            self._pacer.block_arrived(tokens, delay_s)


def _no_time_for(audit: Open) -> Refusal:
    return Refusal(audit.session, audit.attempt, RefusalReason.OVERLOADED, "requests are being served; audit later")
