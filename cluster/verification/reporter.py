"""Reports of a target replica: for the size of its pool and of the draft pool, and for monitoring."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.autoscaling.reports import Growth, TargetReport, share
from cluster.speculation.pacer import Pacer
from cluster.verification.admission import Admission
from cluster.verification.limits import VerificationLimits
from cluster.verification.sequence import TargetSession


@dataclass(frozen=True, slots=True)
class TargetActivity:
    """Current state, and counts since startup."""

    running: int
    queued: int
    cache: float  # share of the pages that sessions hold
    plain_rate: float  # measured tokens per second of non-speculative decoding
    gain: float  # throughput of speculation over that
    speculates: bool
    chosen: Mapping[int, int]  # number of requests by draft length
    blocks_timed: int  # blocks that arrived after they were requested
    block_delay_s: float  # sum of their delays, each from the verdict before
    prefix_tokens: int  # tokens of sessions when they were admitted to the cache
    prefix_hits: int  # those among them that were cached already


class TargetReporter:
    """Reports on one replica's sessions. Audits are left out of autoscaling reports, as no reason for more replicas."""

    def __init__(self, limits: VerificationLimits, admission: Admission, pacer: Pacer) -> None:
        self._limits = limits
        self._admission = admission
        self._pacer = pacer
        self._growth = Growth()
        self._first_tokens = 0  # sessions that have had their first token
        self._first_token_s = 0.0  # sum of the times that they waited for it

    def deciding(self, session: TargetSession, now: float) -> None:
        """Records that tokens are decided for a session, to measure the time to its first token since it was opened
        here."""
        if not session.decided_at and not session.open.audit:
            self._first_tokens += 1
            self._first_token_s += now - session.opened_s

    def report(self, step_s: float, idle_s: float, now: float) -> TargetReport:
        """Returns the report on the time since the previous one.

        `step_s` and `idle_s` are the total seconds so far, in steps and idle; `now` is in seconds.
        """
        grown = self._growth.of(step=step_s, idle=idle_s, first=self._first_tokens, first_s=self._first_token_s)
        running = [session for session in self._admission.running.values() if not session.open.audit]
        queued = [session for session in self._admission.waiting.values() if not session.open.audit]
        wanted = [session for session in running if session.asked]
        drafted = sum(session.drafter is not None for session in wanted)
        unread = [session for session in (*running, *queued) if not session.decided_at]
        so_far_s = sum(now - session.opened_s for session in unread)
        load = self._pacer.load
        return TargetReport(
            running=len(running),
            queued=len(queued),
            drafted=drafted,
            undrafted=len(wanted) - drafted,
            waiting=share(grown["idle"], grown["idle"] + grown["step"]),
            cache=1 - share(self._admission.pages.available, self._limits.pages),
            unread=len(unread),
            first_token_s=share(grown["first_s"] + so_far_s, grown["first"] + len(unread)),
            backlog_s=self._backlog_s(unread),
            gain=load.gain if load.speculates else 1.0,
        )

    def activity(self) -> TargetActivity:
        """Returns the replica's activity for monitoring, audits included."""
        load = self._pacer.load
        return TargetActivity(
            running=len(self._admission.running),
            queued=len(self._admission.waiting),
            cache=1 - share(self._admission.pages.available, self._limits.pages),
            plain_rate=load.plain_rate,
            gain=load.gain,
            speculates=load.speculates,
            chosen=dict(self._pacer.chosen),
            blocks_timed=self._pacer.blocks_timed,
            block_delay_s=self._pacer.block_delay_s,
            prefix_tokens=self._admission.prefix_tokens,
            prefix_hits=self._admission.prefix_hits,
        )

    def _backlog_s(self, unread: list[TargetSession]) -> float:
        """Returns the seconds that full steps would take to feed the prompts of these sessions."""
        tokens = sum(session.prefix.length - session.cached_len for session in unread)
        step_tokens = self._limits.max_step_tokens
        return tokens / step_tokens * self._pacer.load.step.drafts_s(1, step_tokens)
