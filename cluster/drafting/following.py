"""A drafter's sessions, each of which follows its target: it is opened, told verdicts and what is wanted, and closed.

Where a session cannot follow, it asks the target for what it missed, and when that fails the router for the ledger.
"""

import logging
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass

from cluster.dispatch import Send, peer_of
from cluster.drafting.backpressure import Capacity
from cluster.drafting.drafted_session import DraftedSession
from cluster.drafting.requests import Proposal
from cluster.drafting.session_texts import NewsCollector
from cluster.drafting.state_intake import NO_BOUNDS, StateBounds, StateIntake
from cluster.drafting.timing.step_interval import StepIntervalEstimate
from cluster.sentinel.load_check import LoadCheck
from protos.messages import (
    Close,
    Detach,
    DraftAnswer,
    DraftRequest,
    Finish,
    Hello,
    Leaving,
    Message,
    NoDraft,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    States,
    Verdict,
)
from protos.prefix import Prefix
from protos.states import StatesFormat

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """Bounds of one drafter."""

    vocabulary: int
    max_context: int
    max_sessions: int
    states: StatesFormat | None = None  # of the target's hidden states, if the method reads them
    state_bounds: StateBounds = NO_BOUNDS


class FollowedSessions:
    """All sessions of one drafter; `counts` are of events."""

    def __init__(self, limits: DrafterLimits, draft_ahead: bool, counts: Counter[str], load_check: LoadCheck) -> None:
        self.all: OrderedDict[str, DraftedSession] = OrderedDict()  # longest without a block first
        self.news = NewsCollector()  # for the drafting method, with the next pass
        self.ahead: set[str] = set()  # sessions of the pass ahead whose verdict is not in
        self.load_check = load_check
        self.is_leaving = False  # then it takes no more sessions
        self._limits = limits
        self._draft_ahead = draft_ahead
        self._counts = counts
        self._states = StateIntake(
            limits.states, limits.state_bounds, self.all, self.news, counts, self._attach, self._give_up
        )
        self._capacity = Capacity(limits.max_sessions)
        self._step_intervals: dict[str, StepIntervalEstimate] = {}  # by target
        self._resting: set[str] = set()  # targets whose latest word was that they want nothing

    # ------------------------------------------------------------ what peers say

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Takes a message from a router's stream or a target's address; returns what is to be sent for it."""
        match message:
            case Verdict():
                return self._verdict(peer, message, now)
            case States():
                return self._states.receive(peer, message)
            case DraftRequest():
                return self._draft_request(peer, message)
            case Open():
                return self._open(peer, message)
            case Close():
                return self._close(peer, message)
            case Resync():
                return self._begin_anew(peer, message)
            case Hello():
                return self._hello(peer, message)
        raise AssertionError(f"nobody sends a drafter a {type(message).__name__}")

    def connected(self, target: str) -> list[Send]:
        """The stream to a target is new: attach every session that is verified there."""
        return [self._attach(session) for session in self.all.values() if session.target == target]

    def gone(self, peer: str) -> None:
        """A stream broke. A router's sessions are nobody's; a target's wait until it is back or they move."""
        self._resting.discard(peer)
        for name, session in list(self.all.items()):
            if session.router == peer:
                self._forget(name)
            elif session.target == peer:
                session.attached = False

    def leave(self) -> list[Send]:
        """From now on no session is taken; routers are to move those there are."""
        self.is_leaving = True
        return [(router, Leaving()) for router in dict.fromkeys(session.router for session in self.all.values())]

    # ------------------------------------------------------------ routers

    def _hello(self, router: str, hello: Hello) -> list[Send]:
        """A router's stream is new: of what its older streams left, only the sessions that it lists stay."""
        wanted = {item.session for item in hello.live}
        for name, session in list(self.all.items()):
            if peer_of(session.router) != peer_of(router):
                continue
            session.router = router
            if name not in wanted:
                self._forget(name)
        return []

    def _open(self, router: str, request: Open) -> list[Send]:
        """Drafts for a session from its ledger; an open one is replaced unless the request is older.

        Answers with the Attach for its target, or a Refusal for the router.
        """
        if refusal := self._refuse(request):
            return [(router, refusal), *([(router, Leaving())] if self.is_leaving else [])]
        known = self.all.get(request.session)
        if known is not None and known.open.attempt > request.attempt:
            return []
        if known is not None:
            self.news.closed(request.session)  # what the method remembers of it may be what is wrong
        session = DraftedSession(request, router, Prefix(request.hash_key, request.tokens))
        self._states.opened(session)
        if request.target_address in self._resting:
            session.asked = 0  # until it answers the Attach: reading a prompt takes long, and may be for nothing
        self.all[request.session] = session
        self.news.opened(request)
        return [self._attach(session)]

    def _close(self, router: str, close: Close) -> list[Send]:
        """Forgets a session; an unknown one, another router's, or a newer attempt is left alone.

        Answers with the Detach for its target, which may go on with it.
        """
        known = self.all.get(close.session)
        if known is None or known.router != router or known.open.attempt > close.attempt:
            return []
        self._forget(close.session)
        return [_detach(known)]

    # ------------------------------------------------------------ targets

    def _verdict(self, target: str, verdict: Verdict, now: float) -> list[Send]:
        """Follows the target; a gap is asked for, a contradiction goes to the router."""
        session = self._session_at(target, verdict)
        if session is None:
            self._counts["verdict_unknown"] += 1
            return []
        if verdict.base_len > session.prefix.length:
            self._counts["verdict_gap"] += 1
            return [self._attach(session)]
        if not session.prefix.matches(verdict.base_len, verdict.prefix_hash):
            self._counts["verdict_mismatch"] += 1
            return [_resync(session)]
        new = verdict.tokens[session.prefix.length - verdict.base_len :]
        if not new and verdict.finish is Finish.NONE:
            return []  # all that it decides was heard before
        if new and max(new) >= self._limits.vocabulary:
            self._counts["verdict_invalid"] += 1
            self._forget(verdict.session)
            return []
        was_sent = session.sent_len == verdict.base_len
        self._follow(session, new, now)
        if verdict.finish is not Finish.NONE:
            self._forget(verdict.session)
            return []
        sends = self._states.heard(session)
        if was_sent and verdict.answer is not DraftAnswer.NOT_ASKED:
            sends += self.note_block(late=verdict.answer is DraftAnswer.MISSED)
        return sends

    def _follow(self, session: DraftedSession, tokens: tuple[int, ...], now: float) -> None:
        """The verdict is in; the block for what comes after it may be at the target already."""
        self.ahead.discard(session.open.session)
        if session.step_began_s is not None:
            interval = self._step_interval(session.target)
            self._step_intervals[session.target] = interval.after(now - session.step_began_s)
        if session.first is not None and tokens:
            self._note_first(*session.first, tokens[0])
        guessed = bool(session.guesses)
        hit = session.extend(tokens, now)
        self.news.committed(session.open.session, tokens)
        if hit is not None:
            self.hit(session, hit)
        elif guessed:
            self._counts["guess_miss"] += 1

    def _note_first(self, drafted: int, confidence: float, decided: int) -> None:
        """For the check at load, which takes what is decided anyway. A token is accepted just if it is decided."""
        was_over = self.load_check.is_over
        self.load_check = self.load_check.after(confidence, drafted == decided)
        if self.load_check.warning is not None and not was_over:
            log.warning("this drafter is of little use: %s", self.load_check.warning)

    def _draft_request(self, target: str, request: DraftRequest) -> list[Send]:
        """What is wanted from now on; one for another prefix comes too late, or its verdict was lost."""
        session = self._session_at(target, request)
        if session is not None and session.address == (request.base_len, request.prefix_hash):
            session.take(request, goes_ahead=self._draft_ahead)
            (self._resting.discard if session.asked else self._resting.add)(target)
            if session.lacks_states and session.lacks_block:  # nobody is to wait for a block from what is not here yet
                return [(target, NoDraft(request.session, request.base_len, request.prefix_hash))]
        return []

    def _begin_anew(self, target: str, resync: Resync) -> list[Send]:
        """The target says that our tokens are not its own."""
        session = self.all.get(resync.session)
        if session is None or session.target != target:
            return []
        self._counts["resync"] += 1
        session.attached = False
        return [_resync(session)]

    # ------------------------------------------------------------ what passes come to

    def verdict_due(self, session: DraftedSession) -> float:
        """When the verdict over the step under way hardly comes earlier than; endless while nothing is known."""
        least_s = self._step_interval(session.target).least_s
        return math.inf if least_s is None or session.step_began_s is None else session.step_began_s + least_s

    def hit(self, session: DraftedSession, proposal: Proposal) -> None:
        """A block that was drafted ahead is the one that is wanted now."""
        self._counts["guess_hit"] += 1
        self.all.move_to_end(proposal.session)
        session.sent(proposal)

    def note_block(self, late: bool) -> list[Send]:
        """Back-pressure: while blocks are late as a rule, sessions are given up, those unserved for longest first.

        Not those that nothing is wanted for: they take no time that another could have.
        """
        self._counts["blocks_late" if late else "blocks_in_time"] += 1
        excess = self._capacity.note(late, len(self.all))
        drafted_for = [session for session in self.all.values() if session.asked] if excess else []
        why = "blocks come too late for so many sessions"
        return [send for session in drafted_for[:excess] for send in self._give_up(session, why)]

    # ------------------------------------------------------------ helpers

    def _session_at(self, target: str, message: Verdict | DraftRequest) -> DraftedSession | None:
        """The session that this target speaks of in an attempt that is not over."""
        session = self.all.get(message.session)
        if session is None or session.target != target or message.attempt < session.open.attempt:
            return None
        return session

    def _step_interval(self, target: str) -> StepIntervalEstimate:
        return self._step_intervals.get(target) or StepIntervalEstimate()

    def _attach(self, session: DraftedSession) -> Send:
        return session.target, session.begin_anew()

    def _refuse(self, request: Open) -> Refusal | None:
        limits = self._limits
        reason = RefusalReason.INVALID
        why = ""
        if max(request.tokens) >= limits.vocabulary:
            why = f"token id {max(request.tokens)} is outside the vocabulary of {limits.vocabulary}"
        elif request.max_len > limits.max_context:
            why = f"max_len is {request.max_len}, the drafter's context holds {limits.max_context} tokens"
        elif not request.target_address:
            why = "target_address is empty"
        elif self.is_leaving:
            reason = RefusalReason.OVERLOADED
            why = "this drafter is stopping"
        elif len(self.all) >= self._capacity.sessions and request.session not in self.all:
            reason = RefusalReason.OVERLOADED
            why = f"{len(self.all)} sessions are drafted for already"
        elif why := self._states.no_room(len(request.tokens), request.session):
            reason = RefusalReason.OVERLOADED
        return Refusal(request.session, request.attempt, reason, why) if why else None

    def _give_up(self, session: DraftedSession, why: str) -> list[Send]:
        """Others may have room for it."""
        self._counts["given_up"] += 1
        name = session.open.session
        self._forget(name)
        refusal = Refusal(name, session.open.attempt, RefusalReason.OVERLOADED, why)
        return [(session.router, refusal), _detach(session)]

    def _forget(self, name: str) -> None:
        del self.all[name]
        self.ahead.discard(name)
        self.news.closed(name)
        self._states.forget(name)


def _detach(session: DraftedSession) -> Send:
    return session.target, Detach(session.open.session)


def _resync(session: DraftedSession) -> Send:
    return session.router, Resync(session.open.session, session.prefix.length, session.prefix.hash)
