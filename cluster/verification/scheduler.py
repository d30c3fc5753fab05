"""The verification scheduler: plans a target's next step and turns its outcomes into verdicts.

`plan` and `apply` alternate; between them an engine computes. A block is verified only at exactly the length and hash
that it was drafted for. The scheduler knows nothing of torch, gRPC or a clock; callers pass times in.
"""

import logging
import math
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from cluster.autoscaling.reports import TargetReport
from cluster.costs import ForwardCost
from cluster.drafting.requests import max_block_len
from cluster.engines.session_memory import OwnPages, SessionMemory
from cluster.envelope import Send
from cluster.page_allocator import PageCopy, PlaceMove
from cluster.speculation.acceptance import AcceptanceCounts
from cluster.speculation.circuit_breaker import SilentDrafters
from cluster.speculation.cost_model import StepCost
from cluster.speculation.pacer import Pacer, StepShape
from cluster.speculation.policy import Adaptive, Pacing
from cluster.trust.refusals import Refusals
from cluster.verification.admission import Admission
from cluster.verification.block_buffer import BlockCounts
from cluster.verification.draft_quality import AcceptanceSentinel
from cluster.verification.intake import Intake
from cluster.verification.limits import VerificationLimits
from cluster.verification.reporter import TargetReporter
from cluster.verification.sequence import Decision, TargetSession
from cluster.verification.step import Outcome, Row, StepPlan
from cluster.verification.step_deadline import StepTiming
from protos.messages import Collapse, Finish, Message, Open, Refusal, RefusalReason, Resync, Verdict

log = logging.getLogger(__name__)

NONFINITE_LOG_PERIOD_S = 60.0
NONFINITE_MESSAGE = (
    "the model computed NaN or infinite logits for this request, and would again: its weights overflow in model.dtype,"
    " or a device is faulty; ask the operator, whose log names the replica"
)


class VerificationScheduler:
    """Schedules all sessions of one target replica; `memory` defaults to pages of its own."""

    def __init__(
        self,
        limits: VerificationLimits,
        pacing: Pacing | None = None,
        step_cost: ForwardCost | None = None,
        memory: SessionMemory | None = None,
    ) -> None:
        self._limits = limits
        policy = pacing or Adaptive()
        self._pacer = Pacer(policy, step_cost)
        self._silent = SilentDrafters()
        self._timing = StepTiming(policy, self._silent)
        self._pages = memory or OwnPages(limits.pages, limits.page_size, secrets.token_bytes(16))
        self._admission = Admission(limits.max_sessions, self._pages)
        self._counts = BlockCounts()
        self.sentinel = AcceptanceSentinel()
        self.refusals = Refusals(log)
        self._intake = Intake(
            limits, self._admission, self._pacer, self._silent, self._counts, self.sentinel, self.refusals
        )
        self.reporter = TargetReporter(limits, self._admission, self._pacer)
        self.feeds = self._intake.feeds
        self.departure = self._intake.departure
        self.router_of = self._admission.router_of
        self._in_step: list[tuple[TargetSession, Row]] = []
        self._moves: list[PlaceMove] = []  # for the latest step's accepted nodes; made before other cache changes
        self._step_shape = StepShape(0, 0, 0)  # latest step that computed anything
        self._start: float | None = None  # next step, unless a message arrives before; None: to be computed
        self._free_since = 0.0  # time since which sessions could have been in a step and were in none
        self.known_tokens = 0  # decided tokens fed, each once unless it was lost from the cache
        self.step_s = 0.0  # total time in steps
        self.nonfinite = 0  # sessions that ended because their logits were NaN or infinite
        self._nonfinite_log_due = -math.inf
        self.idle_s = 0.0  # total time with sessions and no step, usually waiting for blocks

    # ------------------------------------------------------------ messages from peers

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Handles a message from a router's or a drafter's stream; returns the messages to send in response."""
        self._start = None
        if isinstance(message, Open) and not self._admission.has_sessions:
            self._free_since = now
        return self._intake.receive(peer, message, now)

    def gone(self, peer: str, now: float) -> None:
        """Handles a broken stream.

        A router's sessions are forgotten. A drafter's sessions continue without speculation, after the blocks that
        arrived.
        """
        self._start = None
        self._intake.gone(peer, now)

    # ------------------------------------------------------------ the step

    def plan(self, now: float) -> StepPlan | None:
        """Returns the step to compute now, or None if nothing is due (see `next_due`)."""
        assert not self._in_step, "a step is planned while another is under way"
        self._intake.expire(now)
        self.feeds.before_step()
        copies: list[PageCopy] = []
        dues, self._start = self._timing.dues(self._admission.running, self._pacer.load)
        if self._start <= now:
            self._start = None
            copies = self._fill_step(dues, now)
        closes, opens = self._admission.take_changes()
        rows = tuple(row for _, row in self._in_step)
        if not (self._in_step or opens or closes):
            return None
        self.idle_s += now - self._free_since
        if not rows:
            return StepPlan(closes, opens, ())
        moves = tuple(self._moves)
        self._moves = []
        return StepPlan(closes, opens, rows, tuple(copies), moves)

    def next_due(self) -> float | None:
        """Returns the time of the next step or expiry if nothing else happens; None if there will be none."""
        if self._start is None:
            _, self._start = self._timing.dues(self._admission.running, self._pacer.load)
        expiry = self._intake.next_expiry()
        due = self._start if expiry is None else min(self._start, expiry)
        return due if due < math.inf else None

    def apply(self, outcomes: Sequence[Outcome], seconds: float, now: float) -> list[Send]:
        """Turns the engine's outcomes into verdicts for routers and drafters."""
        self._start = None
        decided = {outcome.session: outcome for outcome in outcomes}
        to_drafters: list[Send] = []
        to_routers: list[Send] = []
        running = self._admission.running
        fed = _as_fed(self._in_step, self._pages)
        if fed != self._in_step:
            self._step_shape = _shape_of(fed, running.values())
        self._in_step = fed
        for session, row in self._in_step:
            name = row.session
            if running.get(name) is not session:
                continue  # closed or replaced while the engine computed
            session.fed(row)
            session.waiting_since = now
            if row.decide and not decided[name].is_finite:
                to_routers.append(self._end_nonfinite(session, now))
                continue
            if not session.open.audit:
                # Before the verdict: a session may end with it, and its cached pages stay useful.
                self._pages.publish(name, session.prefix.tokens, min(session.cached_len, session.prefix.length))
            if row.decide:
                news, verdict = self._decide(session, row, decided[name], now)
                to_drafters += news
                to_routers.append(verdict)
            if running.get(name) is session:
                self._pages.truncate(name, session.cached_len)
        self.feeds.step_made(self._in_step, decided)
        self._silent.missed({drafter for session, _ in self._in_step if (drafter := session.missed_by) is not None})
        if self._in_step:  # otherwise the step only opened and closed sessions
            decoded = [decided[row.session] for _, row in self._in_step if not row.feeds_prompt]
            committed = sum(outcome.token_count for outcome in decoded)
            self._pacer.step_made(self._step_shape, committed, seconds, now - self._free_since)
        self._in_step = []
        self.step_s += seconds
        self._free_since = now
        self._intake.admit(now)
        if self.is_idle:
            self._pages.check()
        return [*to_drafters, *to_routers]  # drafters first: a round waits for its drafter, not for its router

    # ------------------------------------------------------------ inspection

    @property
    def is_idle(self) -> bool:
        """True if nothing is held: no session, no waiting block, nothing pending for the engine."""
        return self._admission.is_empty and self._intake.is_empty and not self._in_step

    def report(self, now: float) -> TargetReport:
        """Returns the autoscaling report on the time since the previous one."""
        return self.reporter.report(self.step_s, self.idle_s, now)

    def load(self) -> dict[str, float]:
        """Returns the number of sessions in the cache, without audits, and in the queue."""
        running = sum([not session.open.audit for session in self._admission.running.values()])
        return {"sessions": float(running), "queued": float(len(self._admission.waiting))}

    @property
    def unasked(self) -> int:
        """Blocks so far for sessions that are not open, or assigned to another drafter."""
        return self._intake.unasked

    @property
    def dropped(self) -> Counter[str]:
        """Blocks that were not verified, by cause."""
        return self._counts.dropped

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that verdicts accepted."""
        return self._counts.accepted_tokens

    @property
    def wasted_tokens(self) -> int:
        """Draft tokens that arrived in well-formed blocks and that no verdict accepted.

        They were rejected or never verified: fewer tokens paid at verification, their block was dropped or replaced by
        a better version, a late block came after the target's own tokens, or their session ended.
        """
        return self._counts.wasted_tokens

    @property
    def rebased(self) -> int:
        """Late blocks that were verified from the target's current length."""
        return self._counts.rebased

    @property
    def preempted(self) -> int:
        """Times that a session lost its pages to an older one."""
        return self._admission.preempted

    @property
    def pages(self) -> dict[str, int]:
        """Pages of the cache: the `total`, and those `held` by sessions now; the others are free or evictable."""
        return {"total": self._limits.pages, "held": self._limits.pages - self._pages.available}

    @property
    def acceptance(self) -> AcceptanceCounts:
        """Counts of all blocks since startup, by position."""
        return self._pacer.acceptance

    @property
    def speculation(self) -> dict[str, float]:
        """State of pacing: non-speculative tokens per second, the gain over them, and whether drafts are requested."""
        load = self._pacer.load
        return {"plain_rate": load.plain_rate, "gain": load.gain, "on": float(load.speculates)}

    @property
    def step_cost(self) -> StepCost:
        """Current cost of steps."""
        return self._pacer.load.step

    @property
    def is_drafted_for(self) -> bool:
        """True if blocks were requested for the latest step, so that its drafters, if any, were at work."""
        return self._step_shape.is_drafted_for

    # ------------------------------------------------------------ helpers

    def _fill_step(self, dues: Mapping[str, float], now: float) -> list[PageCopy]:
        """Adds the sessions that are due to the step, longest unserved first, up to the token budget."""
        budget = self._limits.max_step_tokens
        copies: list[PageCopy] = []
        in_step: set[str] = set()
        for name in list(self._admission.order):
            session = self._admission.running.get(name)  # None: preempted by an earlier one in this loop
            if session is None or budget <= 0 or dues[name] > now:
                continue
            row = session.row(budget)
            tokens = len(row.tokens)
            reserved = self._admission.reserve(session, row.start, row.start + tokens, in_step)
            if reserved is None:
                continue
            copies += reserved
            budget -= tokens
            in_step.add(name)
            self.known_tokens += row.known
            session.in_step = True
            self._in_step.append((session, row.in_pages(self._pages.table(name), self.feeds.to_ride(session, row))))
            self._admission.order.move_to_end(name)
        self._step_shape = _shape_of(self._in_step, self._admission.running.values())
        return copies

    def _decide(self, session: TargetSession, row: Row, outcome: Outcome, now: float) -> tuple[list[Send], Send]:
        """Applies a row's outcome; returns the messages for its drafter and its router."""
        request = session.open
        drafted = row.drafted
        room = max_block_len(request, session.prefix.length)
        if drafted or (session.has_nothing and session.asked):
            self._pacer.block_verified(session.asked, room, drafted, outcome.path)
        asked = min(session.asked, room)
        collapse = self.sentinel.block_verified(session, row.base_len, asked, outcome.accepted) if drafted else None
        self.reporter.deciding(session, now)
        decision = session.decide(row, outcome, now)
        is_over = decision.finish is not Finish.NONE
        if not is_over:
            self._moves += session.moves(row, outcome.path, self._limits.page_size)
        self._intake.ask(session)
        verdict = _verdict(session, decision, outcome, drafted, collapse)
        sends: list[Send] = []
        drafter = session.drafter
        if drafter is not None:
            news = self.feeds.with_states(session, row, outcome, session.for_drafter(verdict))
            sends += [(drafter, message) for message in news]
        if drafter is not None and collapse is not None and not collapse.is_resynced:
            session.drafter = None  # until it attaches again
            sends.append((drafter, Resync(request.session, len(session.prefix), session.prefix.hash)))
        if is_over:
            self._intake.forget(request.session)
        return sends, (session.router, session.for_router(verdict, row, outcome))

    def _end_nonfinite(self, session: TargetSession, now: float) -> Send:
        """Ends a session whose logits are NaN or infinite; its router releases its drafter.

        No other session may read what it cached. Another replica with the same weights would compute the same.
        """
        request = session.open
        self.nonfinite += 1
        if now >= self._nonfinite_log_due:
            self._nonfinite_log_due = now + NONFINITE_LOG_PERIOD_S
            log.error(
                "ended session %r after %d tokens: its logits are NaN or infinite (%d sessions so far);"
                " docs/troubleshooting.md says what to do",
                request.session,
                session.prefix.length,
                self.nonfinite,
            )
        self._pages.withdraw(request.session)
        self._intake.forget(request.session)
        reason = RefusalReason.NONFINITE_LOGITS
        return session.router, Refusal(request.session, request.attempt, reason, NONFINITE_MESSAGE)


def _verdict(
    session: TargetSession, decision: Decision, outcome: Outcome, drafted: int, collapse: Collapse | None
) -> Verdict:
    """Builds the part of a verdict that both router and drafter receive."""
    return Verdict(
        session.open.session,
        session.open.attempt,
        decision.base_len,
        decision.base_hash,
        decision.tokens,
        decision.accepted,
        drafted,
        decision.finish,
        session.answer,
        collapse,
        outcome.margin,
        prefix_cached=session.prefix_cached,
    )


def _as_fed(planned: list[tuple[TargetSession, Row]], memory: SessionMemory) -> list[tuple[TargetSession, Row]]:
    """Replaces planned rows by the rows that were fed; drops those that were not fed, which are due again."""
    for session, _ in planned:
        session.in_step = False
    return [(session, row) for session, at_first in planned if (row := memory.fed(at_first)) is not None]


def _shape_of(in_step: Sequence[tuple[TargetSession, Row]], running: Collection[TargetSession]) -> StepShape:
    """Returns the shape of the step, with which pacing interprets the step's time."""
    prompts = [row for _, row in in_step if row.feeds_prompt]
    return StepShape(
        rows=len(in_step),
        tokens=sum([len(row.tokens) for _, row in in_step]),
        decoding=sum([session.is_decoding for session in running]),
        prompts=len(prompts),
        prompt_tokens=sum([len(row.tokens) for row in prompts]),
        is_drafted_for=any(session.asked and (session.drafter or row.drafted) for session, row in in_step),
        is_open_to_drafts=any(session.open.max_draft_tokens for session, _ in in_step),
    )
