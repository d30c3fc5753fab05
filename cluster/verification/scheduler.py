"""The target's scheduler: what the next step computes, and what it decided.

The alternation of `plan` and `apply` is the whole verification loop; between them an engine computes. A block is
verified only at exactly the length and hash it was drafted for. Knows nothing of torch, gRPC or a clock: times
are handed in.
"""

import logging
import math
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from cluster.autoscaling.reports import TargetReport
from cluster.costs import ForwardCost
from cluster.dispatch import Send
from cluster.drafting.requests import max_block_len
from cluster.engines.session_memory import OwnPages, SessionMemory
from cluster.pacing.acceptance import AcceptanceCounts
from cluster.pacing.health import SilentDrafters
from cluster.pacing.pacer import Pacer, StepShape
from cluster.pacing.policy import Adaptive, Pacing
from cluster.pacing.step_cost import StepCost
from cluster.page_allocator import PageCopy, PlaceMove
from cluster.trust.refusals import Refusals
from cluster.verification.admission import Admission
from cluster.verification.block_buffer import BlockCounts
from cluster.verification.bounds import VerificationLimits
from cluster.verification.intake import Intake
from cluster.verification.sentinel import AcceptanceSentinel
from cluster.verification.sequence import Decision, TargetSession
from cluster.verification.step import Outcome, Row, StepPlan
from cluster.verification.step_timing import StepTiming
from cluster.verification.target_reporter import TargetReporter
from protos.messages import Collapse, Finish, Message, Open, Refusal, RefusalReason, Resync, Verdict

log = logging.getLogger(__name__)

NONFINITE_LOG_PERIOD_S = 60.0
NONFINITE_MESSAGE = (
    "the model computed NaN or infinite logits for this request, and would again: its weights overflow in model.dtype,"
    " or a device is faulty; ask the operator, whose log names the replica"
)


class VerificationScheduler:
    """All sessions of one target replica; `memory` by default pages of its own."""

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
        self._moves: list[PlaceMove] = []  # of what the latest step accepted; before anything else is done to the cache
        self._step_shape = StepShape(0, 0, 0)  # of the latest step that computed anything
        self._start: float | None = None  # of the next step, if nothing is heard before; None: to be asked for
        self._free_since = 0.0  # since when sessions could have been in a step and were in none
        self.known_tokens = 0  # fed though they were decided before: each once, unless its place in the cache was lost
        self.step_s = 0.0  # in steps
        self.nonfinite = 0  # sessions that ended because their logits were NaN or infinite
        self._nonfinite_log_due = -math.inf
        self.idle_s = 0.0  # in no step, though there were sessions: for want of blocks, as a rule

    # ------------------------------------------------------------ what peers say

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Takes a message from a router's or a drafter's stream; returns what is to be sent for it."""
        self._start = None
        if isinstance(message, Open) and not self._admission.has_sessions:
            self._free_since = now
        return self._intake.receive(peer, message, now)

    def gone(self, peer: str, now: float) -> None:
        """A stream broke: a router's sessions are nobody's, a drafter's go on plainly with the blocks that arrived."""
        self._start = None
        self._intake.gone(peer, now)

    # ------------------------------------------------------------ the step

    def plan(self, now: float) -> StepPlan | None:
        """What to compute now, or None when nothing is due (see `next_due`)."""
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
        """When a step or an expiry will be due if nothing else happens; None while nothing could be."""
        if self._start is None:
            _, self._start = self._timing.dues(self._admission.running, self._pacer.load)
        expiry = self._intake.next_expiry()
        due = self._start if expiry is None else min(self._start, expiry)
        return due if due < math.inf else None

    def apply(self, outcomes: Sequence[Outcome], seconds: float, now: float) -> list[Send]:
        """Turns what the engine computed into verdicts, for the router and for the drafter."""
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
                # Before the verdict: a session may end with it, and what it was fed stays useful.
                self._pages.publish(name, session.prefix.tokens, min(session.cached_len, session.prefix.length))
            if row.decide:
                news, verdict = self._decide(session, row, decided[name], now)
                to_drafters += news
                to_routers.append(verdict)
            if running.get(name) is session:
                self._pages.truncate(name, session.cached_len)
        self.feeds.step_made(self._in_step, decided)
        self._silent.missed({drafter for session, _ in self._in_step if (drafter := session.missed_by) is not None})
        if self._in_step:  # else the engine was only told who has come and gone
            decoded = [decided[row.session] for _, row in self._in_step if not row.feeds_prompt]
            committed = sum(outcome.token_count for outcome in decoded)
            self._pacer.step_made(self._step_shape, committed, seconds, now - self._free_since)
        self._in_step = []
        self.step_s += seconds
        self._free_since = now
        self._intake.admit(now)
        if self.is_idle:
            self._pages.check()
        return [*to_drafters, *to_routers]  # a round waits for its drafter, not for its router

    # ------------------------------------------------------------ inspection

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all is held: no session, no waiting block, nothing due to the engine."""
        return self._admission.is_empty and self._intake.is_empty and not self._in_step

    def report(self, now: float) -> TargetReport:
        """For autoscaling, of the time since it was last asked for."""
        return self.reporter.report(self.step_s, self.idle_s, now)

    def load(self) -> dict[str, float]:
        """Sessions in the cache, without audits, and in the queue."""
        running = sum([not session.open.audit for session in self._admission.running.values()])
        return {"sessions": float(running), "queued": float(len(self._admission.waiting))}

    @property
    def unasked(self) -> int:
        """Blocks so far for sessions that are not open, or are another drafter's."""
        return self._intake.unasked

    @property
    def dropped(self) -> Counter[str]:
        """Blocks that were not verified, by cause."""
        return self._counts.dropped

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that verdicts took over from blocks."""
        return self._counts.accepted_tokens

    @property
    def wasted_tokens(self) -> int:
        """Draft tokens that came in well-formed blocks and that no verdict took over.

        They were rejected, or never verified: fewer tokens paid by then, their block was dropped or replaced by a
        better version, a late block came after the target's own tokens, or their session ended.
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
        """What its drafter and its router are told."""
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
        """Ends a session whose logits are NaN or infinite; its drafter is released by its router.

        Nobody else may read what it cached. With the same weights another replica would compute the same.
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
    """What its router and its drafter are both told."""
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
    """A row that was fed otherwise than planned counts as it was fed; one that was not fed is due again."""
    for session, _ in planned:
        session.in_step = False
    return [(session, row) for session, at_first in planned if (row := memory.fed(at_first)) is not None]


def _shape_of(in_step: Sequence[tuple[TargetSession, Row]], running: Collection[TargetSession]) -> StepShape:
    """Of the step that is about to be made, for pacing to learn from its time."""
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
