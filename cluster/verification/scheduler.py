"""Schedules a target replica's steps and converts their outcomes to verdicts.

NOTE on the algorithm. Decoding and verification are the same operation. A session's row in a step contains the tokens
missing from the cache and, if ready, a draft block. One forward pass feeds both and decides at least one token. A
session without a block takes part with a row of one token, so drafters can speed it up but never block it.

    plan    selects due sessions within the token budget, decoding ones before prompts, and reserves their pages
    commit  applies the engine's outcomes to texts, caches and waiting blocks: all that the next plan needs
    settle  converts the committed rows to verdicts, updates statistics, and decides the next draft requests

A caller may plan the next step between `commit` and `settle`, so that the rest of the work overlaps with the engine's;
`apply` does both at once. Messages arrive outside these calls (`receive`). A block is verified only at exactly its own
length and hash, so a wrong or late block only costs time. A step may wait for blocks whose value exceeds the cost of
the wait (`StepDeadline`). The scheduler does no I/O and reads no clock; callers pass times in.
"""

import logging
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.autoscaling import CounterDeltas, TargetReport, share
from cluster.costs import ForwardCost
from cluster.draft_quality import AcceptanceStats, kind_of
from cluster.drafting.requests import max_draft_tokens
from cluster.envelope import Send, peer_of
from cluster.page_allocator import OwnPages, PageCopy, SessionMemory, SlotMove
from cluster.speculation.controller import (
    Adaptive,
    ExpectedBlock,
    PacingPolicy,
    SilentDrafters,
    SpeculationController,
    StepShape,
)
from cluster.speculation.estimators import Load
from cluster.trust import Refusals, ownership_refusal
from cluster.verification.admission import Admission
from cluster.verification.block_buffer import BlockBuffer, BufferLimits, OrphanBuffer, TargetCounts
from cluster.verification.hidden_state_sender import HiddenStateSender
from cluster.verification.sequence import Decision, DrafterAccess, TargetSequence
from cluster.verification.step import Outcome, Row, StepPlan
from protos.messages import (
    Attach,
    Block,
    Close,
    Collapse,
    Detach,
    DraftAnswer,
    Finish,
    Hello,
    Leaving,
    Message,
    NoDraft,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Shape,
    StatesAck,
    StatesFormat,
    Verdict,
)
from protos.prefix import Prefix

log = logging.getLogger(__name__)

STOPPING_MESSAGE = "this target replica is shutting down"
NO_AUDIT_MESSAGE = "this target is serving requests; retry the audit later"
NONFINITE_LOG_PERIOD_S = 60.0
PROMPT_SHARE = 8  # decoding sessions leave 1/PROMPT_SHARE of a step's tokens for prompts, if there are any
NONFINITE_MESSAGE = (
    "the model computed NaN or infinite logits for this request, and a retry would fail alike: the weights overflow in"
    " model.dtype, or a device is faulty; ask the operator, whose log names the replica"
)


class StepDeadline:
    """Computes the due times of sessions and steps."""

    def __init__(self, pacing: PacingPolicy, silent: SilentDrafters) -> None:
        self._pacing = pacing
        self._silent = silent

    def due_times(self, sessions: Mapping[str, TargetSequence], load: Load) -> tuple[dict[str, float], float]:
        """Returns each session's due time, and the start of the next step if no further block arrives.

        A session is due at once unless it skips steps until its block arrives. The step is delayed for awaited blocks.
        Without sessions, its start is infinity.
        """
        due_times: dict[str, float] = {}
        expected: list[TargetSequence] = []
        for name, session in sessions.items():
            request = session.exchange.request
            due_times[name] = session.waiting_since
            drafter = session.awaited_drafter if session.buffer.ready is None else None
            if drafter is not None and self._silent.is_awaited(drafter):
                due_times[name] += request.skip_for_s
                if request.hold_step:
                    expected.append(session)
        first = min(due_times.values(), default=math.inf)
        if not expected:
            return due_times, first
        blocks = [
            ExpectedBlock(
                session.exchange.request.worth,
                session.waiting_since + (session.drafts.delay_s or load.delay.at(session.requested_tokens)) - first,
            )
            for session in expected
        ]
        return due_times, first + self._pacing.hold_for_s(blocks, load)


@dataclass(frozen=True, slots=True)
class VerificationLimits:
    """Limits of one target replica."""

    vocabulary: int  # upper bound of token ids, exclusive
    max_context: int
    max_sessions: int  # maximum sessions in the cache; further sessions queue
    max_step_tokens: int
    pages: int = 4096  # number of pages in the cache
    page_size: int = 16  # positions per page
    trees: bool = True  # True if the engine can verify draft trees
    own_draws_only: bool = False  # True if the engine reports only drawn tokens, without probabilities
    states: StatesFormat | None = None  # format of captured hidden states; None: none are captured
    keeps_states: bool = True  # True if the engine keeps hidden states next to the cache
    verdict_states_bytes: int | None = None  # maximum bytes of hidden states per verdict; None: the default
    window_bytes: int | None = None  # maximum unacknowledged bytes of hidden states per drafter; None: the default
    adapters: frozenset[str] = frozenset()  # names of the LoRA adapters that the engine applies
    max_queued: int = 1024
    buffer: BufferLimits = BufferLimits()  # limits on waiting blocks

    def fault_of(self, request: Open, pages: int) -> str:
        """Returns an error message if the request can never be served, else ""; `pages` is its page count at full
        length.
        """
        if (highest := max(max(request.tokens), request.rival or 0, request.rules.highest_id)) >= self.vocabulary:
            return f"token id {highest} is outside the vocabulary of {self.vocabulary}"
        if request.max_len > self.max_context:
            return f"max_len is {request.max_len}, expected at most {self.max_context}, the target's context"
        if self.own_draws_only and request.uses_draft_probs:
            return "acceptance is rejection, but this target only supports coupled; request coupled, or set a seed"
        if self.own_draws_only and request.scoring.prompt_top is not None:
            return "this target scores only generated tokens; remove prompt_logprobs, or logprobs with echo"
        if request.adapter and request.adapter not in self.adapters:
            return f"this target does not have the adapter '{request.adapter}'; add it to target.adapters"
        if pages > self.pages:
            return f"max_len is {request.max_len}, expected at most {self.pages * self.page_size}, the cache's size"
        return ""

    def rejection_reason(self, block: Block) -> str | None:
        """Returns the cause if a block is invalid for every session, else None."""
        probs = block.tree.probs
        named = [block.tree.tokens, *(probs.token_ids if probs is not None else ())]
        if max(map(max, named)) >= self.vocabulary:
            return "out_of_vocabulary"
        if block.base_len + block.size > self.max_context:
            return "beyond_context"
        return None


class DraftQualityMonitor:
    """Monitors draft quality on one target replica."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceStats()
        self.desyncs = 0  # number of Resyncs sent to drafters after a collapse

    def block_verified(self, session: TargetSequence, length: int, requested: int, accepted: int) -> Collapse | None:
        """Records a verified block after `length` tokens; returns a collapse to report, or None."""
        if session.drafter is None:
            return None  # the drafter has left
        kind = kind_of(length, session.cache.initial > 0)
        self.acceptance.block_verified(peer_of(session.drafter), kind, requested, accepted)
        if not session.watch.block_verified(accepted):
            return None
        self.desyncs += 1
        return Collapse(session.watch.usual.value)


@dataclass(frozen=True, slots=True)
class TargetActivity:
    """Current state of a replica, and its counts since startup."""

    running: int
    queued: int
    cache: float  # share of pages held by sessions
    non_speculative_rate: float  # measured throughput of non-speculative decoding, in tokens per second
    gain: float  # throughput with speculation divided by `non_speculative_rate`
    speculates: bool
    chosen: Mapping[int, int]  # number of draft requests, by draft length
    blocks_timed: int  # number of blocks with a measured delay
    block_delay_s: float  # total delay of these blocks after their verdicts, in seconds
    prefix_tokens: int  # number of tokens of sessions at admission to the cache
    prefix_hits: int  # number of cached tokens among `prefix_tokens`


class TargetReporter:
    """Reports a replica's load. Autoscaling reports omit audits, which do not justify more replicas."""

    def __init__(self, limits: VerificationLimits, admission: Admission, controller: SpeculationController) -> None:
        self._limits = limits
        self._admission = admission
        self._controller = controller
        self._growth = CounterDeltas()
        self._first_tokens = 0  # number of sessions with a first token
        self._first_token_s = 0.0  # total time to first token of these sessions, in seconds

    def record_first_token(self, session: TargetSequence, now: float) -> None:
        """Records a session's time to first token, from the arrival of its Open; call this before each decision."""
        if not session.committed_at and not session.open.audit:
            self._first_tokens += 1
            self._first_token_s += now - session.opened_s

    def report(self, step_s: float, idle_s: float, now: float) -> TargetReport:
        """Returns the report for the time since the previous one.

        `step_s` and `idle_s` are cumulative seconds in steps and idle; `now` is in seconds.
        """
        grown = self._growth.of(step=step_s, idle=idle_s, first=self._first_tokens, first_s=self._first_token_s)
        running = [session for session in self._admission.running.values() if not session.open.audit]
        queued = [session for session in self._admission.waiting.values() if not session.open.audit]
        requesting = [session for session in running if session.requested_tokens]
        drafted = sum(session.drafter is not None for session in requesting)
        unread = [session for session in (*running, *queued) if not session.committed_at]
        so_far_s = sum(now - session.opened_s for session in unread)
        load = self._controller.load
        return TargetReport(
            running=len(running),
            queued=len(queued),
            drafted=drafted,
            undrafted=len(requesting) - drafted,
            waiting=share(grown["idle"], grown["idle"] + grown["step"]),
            cache=1 - share(self._admission.pages.available, self._limits.pages),
            unread=len(unread),
            first_token_s=share(grown["first_s"] + so_far_s, grown["first"] + len(unread)),
            backlog_s=self._backlog_s(unread),
            gain=load.gain if load.speculates else 1.0,
        )

    def activity(self) -> TargetActivity:
        """Returns the replica's activity, including audits, for monitoring."""
        load = self._controller.load
        return TargetActivity(
            running=len(self._admission.running),
            queued=len(self._admission.waiting),
            cache=1 - share(self._admission.pages.available, self._limits.pages),
            non_speculative_rate=load.non_speculative_rate,
            gain=load.gain,
            speculates=load.speculates,
            chosen=dict(self._controller.chosen),
            blocks_timed=self._controller.blocks_timed,
            block_delay_s=self._controller.block_delay_s,
            prefix_tokens=self._admission.prefix_tokens,
            prefix_hits=self._admission.prefix_hits,
        )

    def _backlog_s(self, unread: list[TargetSequence]) -> float:
        """Returns the time to prefill these sessions' prompts in full steps, in seconds."""
        tokens = sum(session.prefix.length - session.cache.length for session in unread)
        step_tokens = self._limits.max_step_tokens
        return tokens / step_tokens * self._controller.load.step.drafts_s(1, step_tokens)


CommittedRow = tuple[TargetSequence, Row, Outcome | None, Decision | None]
"""A row of a committed step; only deciding rows have an outcome and a decision."""


@dataclass(slots=True)
class CommittedStep:
    """A step between `commit` and `settle`."""

    decided: Mapping[str, Outcome]
    seconds: float  # duration of the step
    took_s: float  # the same, with the wait before it
    now: float  # time of the commit
    shape: StepShape
    rows: list[CommittedRow] = field(default_factory=list)
    ended: list[Send] = field(default_factory=list)  # refusals of sessions with NaN or infinite logits
    fed: Sequence[tuple[TargetSequence, Row]] = ()


class VerificationScheduler:
    """Schedules all sessions of a target replica; allocates pages itself unless `memory` is given."""

    def __init__(
        self,
        limits: VerificationLimits,
        pacing: PacingPolicy | None = None,
        step_cost: ForwardCost | None = None,
        memory: SessionMemory | None = None,
    ) -> None:
        self._limits = limits
        policy = pacing or Adaptive()
        self.controller = SpeculationController(policy, step_cost)
        self._silent = SilentDrafters()
        self._timing = StepDeadline(policy, self._silent)
        self._pages = memory or OwnPages(limits.pages, limits.page_size, secrets.token_bytes(16))
        self.admission = Admission(limits.max_sessions, self._pages)
        self.counts = TargetCounts()
        self.draft_quality = DraftQualityMonitor()
        self.refusals = Refusals(log)
        self.reporter = TargetReporter(limits, self.admission, self.controller)
        self.feeds = HiddenStateSender(
            limits.states, self.admission, limits.keeps_states, limits.verdict_states_bytes, limits.window_bytes
        )
        self.is_leaving = False  # True: refuse new sessions
        self._early = OrphanBuffer(limits.buffer, self.counts)  # messages for unopened sessions
        self._in_step: list[tuple[TargetSequence, Row]] = []
        self._committed: CommittedStep | None = None  # the latest step, until it is settled
        self._moves: list[SlotMove] = []  # moves of the latest step's accepted nodes, due before other cache changes
        self._shape: StepShape | None = StepShape(0, 0, 0)  # computed on demand, after the plan is sent
        self._free_since = 0.0  # start of the idle time
        self._nonfinite_log_due = -math.inf

    # ------------------------------------------------------------ messages from peers

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Handles a message from a router's or drafter's stream; returns the messages to send."""
        assert self._committed is None, "the latest step must be settled first"
        if isinstance(message, Open) and not self.admission.has_sessions:
            self._free_since = now
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
                raise AssertionError(f"a target never receives a {type(message).__name__}")
        return []

    def gone(self, peer: str, now: float) -> None:
        """Handles a broken stream.

        Drops the sessions of a lost router. Sessions of a lost drafter use its received blocks, then continue without
        speculation.
        """
        assert self._committed is None, "the latest step must be settled first"
        self._silent.answered(peer)
        for session in self.admission:
            if session.router == peer:
                self._forget(session.open.session)
            elif session.drafter == peer:
                session.detach()
        self._early.drafter_gone(peer)
        self._admit(now)

    # ------------------------------------------------------------ routers

    def _hello(self, router: str, hello: Hello, now: float) -> None:
        """Handles a router's new stream: drops the router's sessions that the Hello does not list."""
        live = {(item.session, item.attempt) for item in hello.live}
        peer = peer_of(router)
        for session in self.admission:
            if peer_of(session.router) != peer:
                continue
            session.router = router
            if (session.open.session, session.open.attempt) not in live:
                self._forget(session.open.session)
        self._admit(now)

    def _open(self, router: str, request: Open, now: float) -> list[Send]:
        """Opens or reopens a session; ignores older attempts and refuses other routers' sessions."""
        name = request.session
        existing = self.admission.find(name)
        if existing is not None and existing.router != router:
            self.refusals.note(router, "an Open of another router's session", name)
            return [(router, ownership_refusal(request))]
        if self.is_leaving:  # not a failure: another target can accept the session
            return [(router, _overloaded(request, STOPPING_MESSAGE)), (router, Leaving())]
        if refusal := self._refuse(request):
            return [(router, refusal)]
        if existing is not None and existing.open.attempt >= request.attempt:
            return []
        self._forget(name)
        sends = [] if request.audit else self._refuse_open(self._audits(), NO_AUDIT_MESSAGE)
        buffer = BlockBuffer(self._limits.buffer, self.counts)
        prefix = Prefix(request.hash_key, request.tokens)
        shape = self._block_shape(request)
        access = DrafterAccess(request, existing.access.drafters if existing is not None else frozenset())
        session = TargetSequence(request, router, prefix, buffer, access, shape, opened_s=now, waiting_since=now)
        self.admission.waiting[name] = session
        self._admit(now)
        if name in self.admission.waiting:
            self._decide_drafting(session, now)  # lets the drafter read the prompt before admission
        for waiting in self._early.take(name):
            if waiting.attach is not None:
                session.access.admit(waiting.drafter, waiting.attach.assignment_token)
            for block in waiting.blocks:
                self._block(waiting.drafter, block, now)
            sends += self._attach(waiting.drafter, waiting.attach, now) if waiting.attach is not None else []
        return sends

    def _close(self, router: str, close: Close, now: float) -> None:
        """Closes a session; ignores unknown sessions, other routers' sessions, and older attempts."""
        session = self.admission.find(close.session)
        if session is not None and session.router == router and session.open.attempt <= close.attempt:
            self._forget(close.session)
            self._admit(now)

    # ------------------------------------------------------------ drafters

    def _attach(self, drafter: str, attach: Attach, now: float) -> list[Send]:
        """Attaches a drafter: sends it missing tokens and the current request, and subscribes it to verdicts."""
        session = self.admission.find(attach.session)
        if session is None:
            self._early.attach(drafter, attach, now)
            return []
        if not session.access.admit(drafter, attach.assignment_token):
            self.refusals.note(drafter, "an Attach to a session that it was not assigned", attach.session)
            return []
        if not session.prefix.matches(attach.have_len, attach.have_hash):
            return [(drafter, Resync(attach.session, len(session.prefix), session.prefix.hash))]
        session.attach(drafter)
        self.controller.draft_attached(attach.draft_version)
        self.feeds.attached(session, drafter, attach)
        request = (drafter, session.draft_request())
        missed = tuple(session.prefix.tokens[attach.have_len :])
        if not missed:
            return [request]
        verdict = Verdict(attach.session, session.open.attempt, attach.have_len, attach.have_hash, missed, 0, 0)
        return [(drafter, verdict), request]

    def _block(self, drafter: str, block: Block, now: float) -> None:
        """Stores a block until its prefix is decided; drops and counts a block that can never be verified."""
        self._silent.answered(drafter)
        if cause := self._limits.rejection_reason(block):
            self.counts.drop(cause, block)
            return
        session = self.admission.find(block.session)
        if session is None:
            self.counts.unrequested += 1
            self._early.block(drafter, block, now)
            return
        if not session.access.admits(drafter):
            self.counts.unrequested += 1
            if drafter not in session.access.replaced:  # a replaced drafter may have sent it before its replacement
                self.refusals.note(drafter, "a Block for a session that it was not assigned", block.session)
            self.counts.drop("not_assigned", block)
            return
        if session.shape is Shape.CHAIN and not block.tree.is_chain:
            self.counts.drop("tree", block)
            return
        self._note_answer(session, block, block.size, now)
        session.buffer.place(block, session.open, session.prefix)

    def _no_draft(self, drafter: str, no_draft: NoDraft, now: float) -> None:
        """Records that the drafter has no block for a prefix, so that no step waits for it."""
        self._silent.answered(drafter)
        session = self.admission.find(no_draft.session)
        if session is None or not session.access.admits(drafter):
            return
        if session.prefix.matches(no_draft.base_len, no_draft.prefix_hash):
            session.exchange.no_draft(no_draft.base_len)
            if not session.in_step:  # during a step no one waits for the answer, so its delay is meaningless
                self._note_answer(session, no_draft, 1, now)  # a NoDraft takes as long as one token

    def _detach(self, drafter: str, detach: Detach) -> None:
        """Detaches a drafter; the session continues without speculation.

        Received blocks stay valid.
        """
        self._early.detach(drafter, detach.session)
        session = self.admission.find(detach.session)
        if session is not None and session.drafter == drafter:
            session.detach()

    # ------------------------------------------------------------ sessions

    def _forget(self, name: str) -> None:
        self._early.ended(name)
        if (session := self.admission.find(name)) is not None:
            session.buffer.leave()
        self.admission.forget(name)

    def _admit(self, now: float) -> None:
        for session in list(self.admission.admit()):
            session.waiting_since = now
            self._decide_drafting(session, now)

    def _decide_drafting(self, session: TargetSequence, now: float) -> None:
        """Decides the session's next draft request."""
        limit = session.open.draft_tokens
        if limit > 0:
            sessions = max(1, len(self.admission.running))
            session.exchange.request = self.controller.decide(session.drafts, limit, sessions, now)

    # ------------------------------------------------------------ the planned end

    def leave(self) -> list[Send]:
        """Starts the planned shutdown: refuses new sessions and asks routers to move existing ones.

        Refuses running audits at once, because no client waits for them.
        """
        self.is_leaving = True
        refusals = self._refuse_open(self._audits(), STOPPING_MESSAGE)
        routers = dict.fromkeys(session.router for session in self.admission)
        return [*refusals, *((router, Leaving()) for router in routers)]

    def refuse_rest(self) -> list[Send]:
        """Refuses all remaining sessions after the drain time."""
        return self._refuse_open(list(self.admission), STOPPING_MESSAGE)

    @property
    def has_left(self) -> bool:
        """True if the replica is leaving and has no sessions."""
        return self.is_leaving and not self.admission.has_sessions

    def _audits(self) -> list[TargetSequence]:
        return [session for session in self.admission if session.open.audit]

    def _refuse_open(self, sessions: list[TargetSequence], why: str) -> list[Send]:
        """Drops open sessions and returns their refusals; routers then reopen them elsewhere or later."""
        for session in sessions:
            self._forget(session.open.session)
        return [(session.router, _overloaded(session.open, why)) for session in sessions]

    # ------------------------------------------------------------ the step

    def plan(self, now: float) -> StepPlan | None:
        """Returns the step to execute now, or None if nothing is due (see `next_due`)."""
        assert not self._in_step, "the previous step must be applied first"
        self._early.expire(now)
        self.feeds.before_step()
        copies: list[PageCopy] = []
        due_times, start = self._timing.due_times(self.admission.running, self.controller.load)
        if start <= now:
            copies = self._fill_step(due_times, now)
        closes, opens = self.admission.take_changes()
        rows = tuple(row for _, row in self._in_step)
        if not (self._in_step or opens or closes):
            return None
        self.counts.idle_s += now - self._free_since
        if not rows:
            return StepPlan(closes, opens, ())
        moves = tuple(self._moves)
        self._moves = []
        return StepPlan(closes, opens, rows, tuple(copies), moves)

    def next_due(self) -> float | None:
        """Returns the time of the next step or expiry, unless a message arrives first; None if nothing is pending."""
        _, start = self._timing.due_times(self.admission.running, self.controller.load)
        expiry = self._early.next_expiry()
        due = start if expiry is None else min(start, expiry)
        return due if due < math.inf else None

    def apply(self, outcomes: Sequence[Outcome], seconds: float, now: float) -> list[Send]:
        """Commits and settles a step that took `seconds`; returns the messages to send."""
        self.commit(outcomes, seconds, now)
        return self.settle()

    def commit(self, outcomes: Sequence[Outcome], seconds: float, now: float) -> None:
        """Applies the engine's outcomes to texts, caches and waiting blocks. `settle` must follow."""
        assert self._committed is None, "the previous step must be settled first"
        decided = {outcome.session: outcome for outcome in outcomes}
        running = self.admission.running
        self._commit_fed()
        step = CommittedStep(decided, seconds, now - self._free_since, now, self._measure_step())
        for session, row in self._in_step:
            name = row.session
            if running.get(name) is not session:
                continue  # closed or replaced during the step
            session.waiting_since = now
            if not row.decide:
                session.cache.fed(row)
                step.rows.append((session, row, None, None))
                continue
            outcome = decided[name]
            # An engine that reports only drawn tokens (vLLM) has already committed one.
            if not outcome.is_finite and row.drafted and not self._limits.own_draws_only:
                session.drop_draft()
                continue
            if not outcome.is_finite:
                step.ended.append(self._end_nonfinite(session, now))
                continue
            decision = session.commit(row, outcome)
            step.rows.append((session, row, outcome, decision))
            if decision.finish is Finish.NONE:
                if outcome.path:
                    self._moves += session.cache.moves(row, outcome.path, self._limits.page_size)
            else:
                self._publish(session, row)  # the session ends here, but its cached pages stay useful
                self._forget(name)
        step.fed = self._in_step
        self._in_step = []
        self._free_since = now
        self._committed = step

    def settle(self) -> list[Send]:
        """Returns the messages of the committed step, and updates statistics and draft requests.

        Returns messages for drafters first, because the next round depends on the drafter, not on the router.
        """
        step = self._committed
        if step is None:
            return []
        self._committed = None
        to_drafters: list[Send] = []
        to_routers: list[Send] = step.ended
        running = self.admission.running
        for session, row, outcome, decision in step.rows:
            if running.get(row.session) is session:
                self._publish(session, row)
            if decision is not None and outcome is not None:
                news, verdict = self._settle(session, row, outcome, decision, step)
                to_drafters += news
                to_routers.append(verdict)
        self._learn(step)
        self._measure_step()  # while the engine works, not at the next commit
        self._admit(step.now)
        return [*to_drafters, *to_routers]

    @property
    def is_settled(self) -> bool:
        """True if no committed step must still be settled."""
        return self._committed is None

    @property
    def settles_first(self) -> bool:
        """True if a committed step must be settled before the next plan.

        Drafters may read its hidden states, or the plan may depend on draft requests that only `settle` decides.
        """
        if self._limits.states is not None:
            return True
        running = self.admission.running.values()
        return any(session.buffer.ready is None and session.open.draft_tokens for session in running)

    # ------------------------------------------------------------ inspection

    @property
    def is_idle(self) -> bool:
        """True if there are no sessions, no buffered messages, and no pending changes for the engine."""
        return self.admission.is_empty and not self._early and not self._in_step and self._committed is None

    def report(self, now: float) -> TargetReport:
        """Returns the autoscaling report for the time since the previous one."""
        return self.reporter.report(self.counts.step_s, self.counts.idle_s, now)

    def load(self) -> dict[str, float]:
        """Returns the number of sessions in the cache (without audits) and in the queue."""
        running = sum([not session.open.audit for session in self.admission.running.values()])
        return {"sessions": float(running), "queued": float(len(self.admission.waiting))}

    @property
    def page_counts(self) -> dict[str, int]:
        """Cache pages: `total`, and `held` by sessions; the others are free or evictable."""
        return {"total": self._limits.pages, "held": self._limits.pages - self._pages.available}

    @property
    def is_drafted_for(self) -> bool:
        """True if a row of the latest step had a draft, or a block was requested for it."""
        return self._measure_step().is_drafted_for

    # ------------------------------------------------------------ helpers

    def _fill_step(self, due_times: Mapping[str, float], now: float) -> list[PageCopy]:
        """Adds due sessions to the step within the token budget: first decoding ones, then prompts with the rest.

        Of each kind, the longest unserved come first. Decoding sessions leave a share of the budget for prompts.
        """
        budget = self._limits.max_step_tokens
        copies: list[PageCopy] = []
        in_step: set[str] = set()
        running = self.admission.running
        turns = list(self.admission.order)
        prompts = {name for name, session in running.items() if not session.is_decoding}
        for_prompts = 0  # tokens that decoding sessions leave for prompts
        if prompts:
            turns.sort(key=prompts.__contains__)
            for_prompts = -(-budget // PROMPT_SHARE)
        for name in turns:
            session = running.get(name)  # None: preempted earlier in this loop
            left = budget if name in prompts else budget - for_prompts
            if session is None or left <= 0 or due_times[name] > now:
                continue
            tokens, draft, decides = session.next_tokens(left)
            start = session.cache.length
            end = start + len(tokens)
            if (reserved := self.admission.reserve(session, start, end, in_step)) is None:
                continue
            copies += reserved
            budget -= len(tokens)
            in_step.add(name)
            row = Row(name, tokens, start, decides, self._pages.table(name), draft)
            if session.feed is not None and (slots := self.feeds.slots_with_verdict(session, row)):
                row = replace(row, state_slots=slots)
            self.counts.known_tokens += len(tokens) - len(draft.tokens)
            session.join_step(row)
            self._in_step.append((session, row))
            self.admission.order.move_to_end(name)
        self._shape = None
        return copies

    def _measure_step(self) -> StepShape:
        """Returns the shape of the latest step with rows."""
        if self._shape is None:
            self._shape = _shape_of(self._in_step, self.admission.running.values())
        return self._shape

    def _commit_fed(self) -> None:
        """Replaces planned rows with the rows that the engine fed, and drops rows not fed, which remain due."""
        planned = self._in_step
        for session, _ in planned:
            session.in_step = False
        self._in_step = [(session, fed) for session, row in planned if (fed := self._pages.fed(row)) is not None]
        if self._in_step != planned:
            self._shape = None

    def _publish(self, session: TargetSequence, row: Row) -> None:
        """Publishes the whole pages of committed tokens that the row completed."""
        if not session.open.audit:
            self._pages.publish(row.session, session.prefix.tokens, row.base_len)

    def _learn(self, step: CommittedStep) -> None:
        """Updates hidden-state feeds, silent drafters and the speculation controller after a step."""
        self.feeds.record_step(step.fed, step.decided)
        missed = [
            session.drafter
            for session, _, _, decision in step.rows
            if decision is not None and decision.answer is DraftAnswer.MISSED
        ]
        self._silent.missed({drafter for drafter in missed if drafter is not None})
        if step.fed:  # a step without rows only opens and closes sessions
            decoded = [step.decided[row.session] for _, row in step.fed if not row.feeds_prompt]
            committed = sum(outcome.token_count for outcome in decoded)
            self.controller.record_step(step.shape, committed, step.seconds, step.took_s)
        self.counts.step_s += step.seconds

    def _settle(
        self, session: TargetSequence, row: Row, outcome: Outcome, decision: Decision, step: CommittedStep
    ) -> tuple[list[Send], Send]:
        """Learns from a committed row; returns the messages for the session's drafter and router."""
        request = session.open
        drafted = row.drafted
        room = max_draft_tokens(request, decision.base_len)
        requested = min(decision.requested, room)
        if drafted or (decision.had_no_draft and requested):
            self.controller.block_verified(session.drafts, decision.requested, room, drafted, outcome.path)
        elif decision.answer is DraftAnswer.MISSED:
            self.controller.block_missed(session.drafts, decision.requested, step.took_s - step.seconds)
        collapse = (
            self.draft_quality.block_verified(session, row.base_len, requested, outcome.accepted) if drafted else None
        )
        self.reporter.record_first_token(session, step.now)
        session.learn(row, outcome, decision, step.now)
        if decision.finish is Finish.NONE:
            self._decide_drafting(session, step.now)
        verdict = _verdict(session, decision, outcome, drafted, collapse)
        sends: list[Send] = []
        drafter = session.drafter
        if drafter is not None:
            news = self.feeds.with_states(session, row, outcome, session.for_drafter(verdict))
            sends += [(drafter, message) for message in news]
        if drafter is not None and collapse is not None:
            session.detach()  # the drafter will attach again
            sends.append((drafter, Resync(request.session, len(session.prefix), session.prefix.hash)))
        return sends, (session.router, session.for_router(verdict, row, outcome))

    def _end_nonfinite(self, session: TargetSequence, now: float) -> Send:
        """Ends a session with NaN or infinite logits; its router releases its drafter.

        Withdraws the session's pages from sharing. A retry on another target is useless, because the same weights
        compute the same logits.
        """
        request = session.open
        self.counts.nonfinite += 1
        if now >= self._nonfinite_log_due:
            self._nonfinite_log_due = now + NONFINITE_LOG_PERIOD_S
            log.error(
                "ended session %r after %d tokens: its logits are NaN or infinite (%d sessions so far);"
                " see docs/troubleshooting.md",
                request.session,
                session.prefix.length,
                self.counts.nonfinite,
            )
        self._pages.withdraw(request.session)
        self._forget(request.session)
        reason = RefusalReason.NONFINITE_LOGITS
        return session.router, Refusal(request.session, request.attempt, reason, NONFINITE_MESSAGE)

    def _block_shape(self, request: Open) -> Shape:
        """Returns the block shape for a session."""
        return Shape.TREE if self._limits.trees and request.takes_trees else Shape.CHAIN

    def _refuse(self, request: Open) -> Refusal | None:
        if request.audit and not all(session.open.audit for session in self.admission):
            return _overloaded(request, NO_AUDIT_MESSAGE)
        reason = RefusalReason.INVALID
        why = self._limits.fault_of(request, self.admission.pages.pages_for(request.max_len))
        if not why and len(self.admission.waiting) >= self._limits.max_queued:
            reason = RefusalReason.OVERLOADED
            why = f"the queue is full with {len(self.admission.waiting)} sessions"
        return Refusal(request.session, request.attempt, reason, why) if why else None

    def _note_answer(self, session: TargetSequence, answer: Block | NoDraft, tokens: int, now: float) -> None:
        """Records an answer and its delay; the delays of lookahead blocks and of a drafter's first answer, which
        includes prefill, are ignored.
        """
        session.exchange.has_answered = True
        delay_s = session.delay_of(answer, now) if session.drafts.has_drafted else None
        session.drafts.block_arrived(delay_s)
        if delay_s is not None:
            self.controller.block_arrived(tokens, delay_s)


def _overloaded(request: Open, why: str) -> Refusal:
    return Refusal(request.session, request.attempt, RefusalReason.OVERLOADED, why)


def _verdict(
    session: TargetSequence, decision: Decision, outcome: Outcome, drafted: int, collapse: Collapse | None
) -> Verdict:
    """Builds the fields of a verdict common to router and drafter."""
    return Verdict(
        session.open.session,
        session.open.attempt,
        decision.base_len,
        decision.base_hash,
        decision.tokens,
        decision.accepted,
        drafted,
        decision.finish,
        decision.answer,
        collapse,
        outcome.margin,
        prefix_cached=session.cache.initial,
    )


def _shape_of(in_step: Sequence[tuple[TargetSequence, Row]], running: Collection[TargetSequence]) -> StepShape:
    """Returns the shape of the step for the speculation controller."""
    prompts = [row for _, row in in_step if row.feeds_prompt]
    return StepShape(
        rows=len(in_step),
        tokens=sum([len(row.tokens) for _, row in in_step]),
        decoding=sum([session.is_decoding for session in running]),
        prompts=len(prompts),
        prompt_tokens=sum([len(row.tokens) for row in prompts]),
        is_drafted_for=any(row.drafted or session.is_drafted_for for session, row in in_step),
        is_open_to_drafts=any(session.open.draft_tokens for session, _ in in_step),
    )
