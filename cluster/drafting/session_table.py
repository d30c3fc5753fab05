"""Keeps a drafter's sessions synchronized with their targets and routers.

A session starts with an Open and follows its target's verdicts and draft requests. After a gap, the drafter requests
the missing tokens from the target. After a contradiction, it requests the ledger from the router.

`Capacity` limits the number of sessions: the limit drops by a quarter when nearly all blocks of a window are late, and
grows slowly while few are. A full drafter divides its sessions evenly among models. `StepIntervalEstimate` predicts
when a verdict is due; lookahead blocks lose their value after that time. Pure: callers pass times in.
"""

import logging
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.draft_quality import LoadCheck, VersionWatch
from cluster.drafting.draft_sequence import DraftSequence
from cluster.drafting.hidden_state_receiver import NO_BOUNDS, HiddenStateReceiver, StateBounds
from cluster.drafting.requests import Proposal, SessionUpdates
from cluster.envelope import Send, peer_of, states_stream
from cluster.speculation.estimators import blend
from protos.frozen import value
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
    StatesAck,
    StatesFormat,
    Verdict,
)
from protos.prefix import Prefix

WINDOW_BLOCKS = 8  # blocks per session and window; enough to distinguish LATE_SHARE from IN_TIME_SHARE
MIN_WINDOW_BLOCKS = 64  # minimum blocks per window, over all sessions
LATE_SHARE = 0.9  # share of late blocks above which sessions are given up; 0.5 is normal when targets do not wait
IN_TIME_SHARE = 0.25  # share of late blocks below which the limit grows; 0.18 is usual on shared cores
SHED_SHARE = 0.25  # share of sessions to give up


class Capacity:
    """Adapts a drafter's session limit, up to `most` sessions, by additive increase and multiplicative decrease."""

    def __init__(self, most: int) -> None:
        self.sessions = most
        self._most = most
        self._blocks = self._late = 0  # counts in the current window

    def note(self, late: bool, sessions: int) -> int:
        """Records a block, late or in time; returns the number of current `sessions` to give up now."""
        self._blocks += 1
        self._late += late
        if self._blocks < max(MIN_WINDOW_BLOCKS, WINDOW_BLOCKS * sessions):
            return 0
        share = self._late / self._blocks
        self._blocks = self._late = 0
        if share > LATE_SHARE and sessions > 1:
            self.sessions = sessions - max(1, int(SHED_SHARE * sessions))
            return sessions - self.sessions
        if share < IN_TIME_SHARE:
            self.sessions = min(self._most, self.sessions + 1)
        return 0


INTERVAL_MEMORY = 0.125  # weight of the latest step, as for TCP round-trip times (RFC 6298)


@value
class StepIntervalEstimate:
    """Drafter-side estimate of one target's step duration, from the start of a step to the arrival of its verdict."""

    mean_s: float = 0.0  # 0: no measurement yet
    deviation_s: float = 0.0  # mean absolute deviation

    def after(self, seconds: float) -> "StepIntervalEstimate":
        if not self.mean_s:
            return StepIntervalEstimate(seconds)
        distance = abs(seconds - self.mean_s)
        return StepIntervalEstimate(
            blend(self.mean_s, seconds, INTERVAL_MEMORY), blend(self.deviation_s, distance, INTERVAL_MEMORY)
        )

    @property
    def earliest_s(self) -> float | None:
        """Likely minimum duration of a step, in seconds; None before the first measurement."""
        return max(0.0, self.mean_s - self.deviation_s) if self.mean_s else None


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """Limits of one drafter."""

    vocabulary: int
    max_context: int
    max_sessions: int
    states: StatesFormat | None = None  # format of hidden states, if the method reads them
    state_bounds: StateBounds = NO_BOUNDS


class SessionTable:
    """All sessions of one drafter; counts events in `counts`."""

    def __init__(
        self,
        limits: DrafterLimits,
        draft_ahead: bool,
        counts: Counter[str],
        load_check: LoadCheck,
        version_watch: VersionWatch,
    ) -> None:
        self.all: OrderedDict[str, DraftSequence] = OrderedDict()  # longest unserved first
        self.updates = SessionUpdates()  # updates for the method's next pass
        self.lookahead: set[str] = set()  # sessions of the latest lookahead pass with a pending verdict
        self.load_check = load_check
        self.version_watch = version_watch
        self.is_leaving = False  # True: refuse new sessions
        self._limits = limits
        self._draft_ahead = draft_ahead
        self._counts = counts
        self._states = HiddenStateReceiver(limits.states, limits.state_bounds, self.all, self.updates, counts)
        self._capacity = Capacity(limits.max_sessions)
        self._step_intervals: dict[str, StepIntervalEstimate] = {}  # estimates by target
        self._paused_targets: set[str] = set()  # targets whose latest request was for 0 tokens

    # ------------------------------------------------------------ messages from peers

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Handles a message from a router (stream name) or target (address); returns the messages to send."""
        match message:
            case Verdict():
                return self._verdict(peer, message, now)
            case DraftRequest():
                return self._draft_request(peer, message)
            case States():
                return self._on_states(peer, message)
            case Open():
                return self._open(peer, message)
            case Close():
                return self._close(peer, message)
            case Resync():
                return self._on_resync(peer, message)
            case Hello():
                return self._hello(peer, message)
        raise AssertionError(f"a drafter never receives a {type(message).__name__}")

    def connected(self, target: str) -> list[Send]:
        """Handles a new stream to `target`: attaches all sessions of that target."""
        return [self._attach(session) for session in self.all.values() if session.target == target]

    def gone(self, peer: str) -> list[Send]:
        """Handles a broken stream; returns the messages to send.

        Drops the sessions of a lost router. Sessions of a lost target wait until the target returns or their router
        moves them.
        """
        self._paused_targets.discard(peer)
        for session in self.all.values():
            if session.target == peer:
                session.attached = False
        return self._drop([session for session in self.all.values() if session.router == peer])

    def leave(self) -> list[Send]:
        """Stops accepting sessions and asks the routers to move the existing ones."""
        self.is_leaving = True
        return [(router, Leaving()) for router in dict.fromkeys(session.router for session in self.all.values())]

    # ------------------------------------------------------------ routers

    def _hello(self, router: str, hello: Hello) -> list[Send]:
        """Handles a router's new stream: drops the router's sessions that the Hello does not list."""
        live = {item.session for item in hello.live}
        own = [session for session in self.all.values() if peer_of(session.router) == peer_of(router)]
        for session in own:
            session.router = router
        return self._drop([session for session in own if session.open.session not in live])

    def _open(self, router: str, request: Open) -> list[Send]:
        """Opens or reopens a session; ignores an Open of an older attempt.

        Returns the Attach for the session's target, or a Refusal for the router.
        """
        is_full = len(self.all) >= self._capacity.sessions and request.session not in self.all
        surplus = self._surplus(request.model) if is_full else None
        if refusal := self._refuse(request, has_room=surplus is not None or not is_full):
            return [(router, refusal), *([(router, Leaving())] if self.is_leaving else [])]
        existing = self.all.get(request.session)
        if existing is not None and existing.open.attempt > request.attempt:
            return []
        if existing is not None:
            self.updates.close(request.session)  # the method's copy may be wrong
        session = DraftSequence(request, router, Prefix(request.hash_key, request.tokens))
        self._states.opened(session)
        if request.target_address in self._paused_targets:
            # Do not draft until the target answers the Attach, because prefilling the prompt may be wasted work.
            session.requested_tokens = 0
        self.all[request.session] = session
        self.updates.open(request)
        if request.draft_prompt:
            self._counts["draft_prompts"] += 1
        room = self._give_up(surplus, "this drafter is full, and another model has fewer sessions") if surplus else []
        return [*room, self._attach(session)]

    def _close(self, router: str, close: Close) -> list[Send]:
        """Closes a session; ignores unknown sessions, other routers' sessions, and older attempts."""
        session = self.all.get(close.session)
        if session is None or session.router != router or session.open.attempt > close.attempt:
            return []
        return self._drop([session])

    # ------------------------------------------------------------ targets

    def _verdict(self, target: str, verdict: Verdict, now: float) -> list[Send]:
        """Applies a target's verdict.

        After a gap, requests the missing tokens from the target. After a contradiction, requests the ledger from the
        router.
        """
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
            return []  # duplicate verdict
        if new and max(new) >= self._limits.vocabulary:
            self._counts["verdict_invalid"] += 1
            return self._drop([session])
        was_sent = session.sent_len == verdict.base_len
        if was_sent and verdict.drafted and session.is_counted:
            self.version_watch.block_verified(verdict.session, verdict.accepted, session.block.depth)
        self._follow(session, new, now)
        if verdict.finish is not Finish.NONE:
            self._forget(verdict.session)
            return []
        sends: list[Send] = []
        if early := self._states.take_early(session):
            sends += self._keep_states(session, early, acks=True)
        if was_sent and verdict.answer is not DraftAnswer.NOT_ASKED:
            sends += self.note_block(late=verdict.answer is DraftAnswer.MISSED)
        return sends

    def _follow(self, session: DraftSequence, tokens: tuple[int, ...], now: float) -> None:
        """Applies a verdict's tokens, and detects whether a block sent ahead fits them."""
        self.lookahead.discard(session.open.session)
        if session.step_began_s is not None:
            interval = self._step_interval(session.target)
            self._step_intervals[session.target] = interval.after(now - session.step_began_s)
        if session.first is not None and not self.load_check.is_over and tokens and session.is_counted:
            self._note_first(*session.first, tokens[0])
        guessed = bool(session.guesses)
        hit = session.extend(tokens, now)
        self.updates.commit(session.open.session, tokens)
        if hit is not None:
            self.hit(session, hit)
        elif guessed:
            self._counts["guess_miss"] += 1

    def _note_first(self, drafted: int, confidence: float, decided: int) -> None:
        """Updates the load check with a block's first token; it counts as accepted if it equals the decided token."""
        self.load_check = self.load_check.after(confidence, drafted == decided)
        if self.load_check.warning is not None:
            log.warning("low acceptance of this drafter: %s", self.load_check.warning)

    def _draft_request(self, target: str, request: DraftRequest) -> list[Send]:
        """Applies a target's draft request.

        Ignores a request for another prefix, which is outdated or follows a lost verdict.
        """
        session = self._session_at(target, request)
        if session is not None and session.address == (request.base_len, request.prefix_hash):
            session.apply_request(request, drafts_ahead=self._draft_ahead)
            (self._paused_targets.discard if session.requested_tokens else self._paused_targets.add)(target)
            if session.lacks_states and session.lacks_block:  # the target must not wait for its own missing states
                return [(target, NoDraft(request.session, request.base_len, request.prefix_hash))]
        return []

    def _on_states(self, peer: str, states: States) -> list[Send]:
        """Handles hidden states from a target's address or states stream; acknowledges states from the stream."""
        session = self.all.get(states.session)
        if session is None or peer not in (session.target, states_stream(session.target)):
            self._counts["states_unknown"] += 1
            return []
        return self._keep_states(session, [states], acks=peer != session.target)

    def _keep_states(self, session: DraftSequence, arrived: list[States], acks: bool) -> list[Send]:
        """Stores hidden states and requests missing ones; gives the session up if they exceed the limit."""
        gaps = [states for states in arrived if self._states.receive(session, states)]
        if why := self._states.capacity_error():
            return self._give_up(session, why)
        if gaps:
            return [self._attach(session)]
        if not acks or not session.states_len:
            return []
        return [(states_stream(session.target), StatesAck(session.open.session, session.states_len))]

    def _on_resync(self, target: str, resync: Resync) -> list[Send]:
        """Handles a target's report of different tokens: requests the ledger from the router."""
        session = self.all.get(resync.session)
        if session is None or session.target != target:
            return []
        self._counts["resync"] += 1
        session.attached = False
        return [_resync(session)]

    def exchanged(self, version: int, load_check: LoadCheck) -> None:
        """Starts separate acceptance counts for the new weights, and restores the session limit.

        Training the new weights may have delayed blocks and lowered the limit.
        """
        self.load_check = load_check
        self._capacity = Capacity(self._limits.max_sessions)
        self.version_watch.exchanged(version)
        for session in self.all.values():
            session.exchanged()

    # ------------------------------------------------------------ results of passes

    def verdict_due(self, session: DraftSequence) -> float:
        """Returns the earliest likely arrival of the pending verdict; infinity if unknown."""
        earliest_s = self._step_interval(session.target).earliest_s
        return math.inf if earliest_s is None or session.step_began_s is None else session.step_began_s + earliest_s

    def hit(self, session: DraftSequence, proposal: Proposal) -> None:
        """Records that a lookahead block fits the current prefix."""
        self._counts["guess_hit"] += 1
        self.all.move_to_end(proposal.session)
        session.sent(proposal)

    def note_block(self, late: bool) -> list[Send]:
        """Records a block, late or in time. When nearly all blocks are late, gives up sessions of the models with the
        most sessions, longest unserved first.

        Keeps sessions without requested tokens, because they cost no drafting time.
        """
        self._counts["blocks_late" if late else "blocks_in_time"] += 1
        excess = self._capacity.note(late, len(self.all))
        if not excess:
            return []
        surplus = _by_surplus(session for session in self.all.values() if session.requested_tokens)
        why = "nearly all blocks are late; this drafter has too many sessions"
        return [send for session in surplus[:excess] for send in self._give_up(session, why)]

    # ------------------------------------------------------------ helpers

    def _session_at(self, target: str, message: Verdict | DraftRequest) -> DraftSequence | None:
        """Looks up the session of a target's message.

        Returns None if the session is unknown or has another target, or if the message belongs to an older attempt.
        """
        session = self.all.get(message.session)
        if session is None or session.target != target or message.attempt < session.open.attempt:
            return None
        return session

    def _step_interval(self, target: str) -> StepIntervalEstimate:
        return self._step_intervals.get(target) or StepIntervalEstimate()

    def _attach(self, session: DraftSequence) -> Send:
        return session.target, session.reset(self.version_watch.version)

    def _surplus(self, model: str) -> DraftSequence | None:
        """Returns a session of another model to replace by one of `model`, if that evens out their shares."""
        counts = Counter(session.open.model for session in self.all.values())
        largest, most = counts.most_common(1)[0]
        if most - counts[model] < 2:
            return None
        return next(session for session in self.all.values() if session.open.model == largest)

    def _refuse(self, request: Open, has_room: bool) -> Refusal | None:
        limits = self._limits
        reason = RefusalReason.INVALID
        why = ""
        if max(request.tokens) >= limits.vocabulary:
            why = f"token id {max(request.tokens)} is outside the vocabulary of {limits.vocabulary}"
        elif request.max_len > limits.max_context:
            why = f"max_len is {request.max_len}, expected at most {limits.max_context}, the drafter's context"
        elif not request.target_address:
            why = "target_address is empty"
        elif self.is_leaving:
            reason = RefusalReason.OVERLOADED
            why = "this drafter is shutting down"
        elif not has_room:
            reason = RefusalReason.OVERLOADED
            why = f"this drafter is full with {len(self.all)} sessions"
        elif why := self._states.capacity_error(len(request.tokens), request.session):
            reason = RefusalReason.OVERLOADED
        return Refusal(request.session, request.attempt, reason, why) if why else None

    def _give_up(self, session: DraftSequence, why: str) -> list[Send]:
        """Drops a session with a refusal, so that its router can choose another drafter."""
        self._counts["given_up"] += 1
        refusal = Refusal(session.open.session, session.open.attempt, RefusalReason.OVERLOADED, why)
        return [(session.router, refusal), *self._drop([session])]

    def _drop(self, sessions: list[DraftSequence]) -> list[Send]:
        """Forgets sessions; returns a Detach for each session's target, which may still serve it."""
        for session in sessions:
            self._forget(session.open.session)
        return [(session.target, Detach(session.open.session)) for session in sessions]

    def _forget(self, name: str) -> None:
        del self.all[name]
        self.lookahead.discard(name)
        self.version_watch.close(name)
        self.updates.close(name)
        self._states.forget(name)


def _by_surplus(sessions: Iterable[DraftSequence]) -> list[DraftSequence]:
    """Orders sessions so that dropping the first ones leaves each model an even share; keeps the order in a model."""
    by_model: defaultdict[str, list[DraftSequence]] = defaultdict(list)
    for session in sessions:
        by_model[session.open.model].append(session)
    ranked = [(len(own) - at, session) for own in by_model.values() for at, session in enumerate(own)]
    return [session for _, session in sorted(ranked, key=lambda one: -one[0])]


def _resync(session: DraftSequence) -> Send:
    return session.router, Resync(session.open.session, session.prefix.length, session.prefix.hash)
