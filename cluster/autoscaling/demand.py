"""Replicas that each pool needs for its load: pure arithmetic, with a reason for display.

A need is a number of replicas and may be fractional. The largest need counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.autoscaling.reports import DraftReport, TargetReport

ROOM = 0.5  # default utilisation: a pool can take twice its load while further replicas start
CACHE_FULL = 0.8  # share of the pages that sessions may hold: beyond it, a long session preempts others
IN_TIME = 0.125  # share of blocks, or of a target's time, that may be lost: below it, drafters take more sessions
# Margin over the need before a pool shrinks: fewer replicas are slower, so sessions last longer and more run at once.
SPARE = 0.25


@dataclass(frozen=True)
class TargetScaling:
    """Rules by which the target pool follows its load."""

    sessions_per_replica: float  # per replica without speculation
    max_sessions: float  # capacity of a replica
    first_token_s: float  # time to first token beyond which waiting prompts call for another replica
    up_delay_s: float
    down_delay_s: float


@dataclass(frozen=True)
class DraftScaling:
    """Rules by which the draft pool follows the demand for drafts, or the size of the target pool."""

    sessions_per_replica: float
    up_delay_s: float
    down_delay_s: float
    per_target: float | None = None  # drafters per target replica, independent of demand; None: by need


@dataclass(frozen=True)
class Need:
    """The need of one pool."""

    replicas: float
    why: str

    def size(self, present: int) -> int:
        """Returns the replicas needed; fewer than at present only if those suffice with a margin."""
        enough = math.ceil(self.replicas)
        return enough if enough > present else min(present, math.ceil(self.replicas * (1 + SPARE)))


def target_need(reports: Sequence[TargetReport], scaling: TargetScaling, present: int) -> Need | None:
    """Returns the need of the target pool with `present` replicas; None until one of them has reported."""
    if not reports:
        return None
    return _largest(_places(reports, scaling), _cache(reports), _prompts(reports, scaling, present))


def draft_need(
    targets: Sequence[TargetReport], drafters: Sequence[DraftReport], scaling: DraftScaling, present: int
) -> Need | None:
    """Returns the need of the draft pool with `present` replicas; None until a target has reported the demand.

    Sessions without a drafter, because there is none or because drafters refused them, count like those with one. So a
    pool can grow from zero, and one that sheds sessions grows.
    """
    if not targets:
        return None
    drafted = sum(report.drafted for report in targets)
    undrafted = sum(report.undrafted for report in targets)
    wanted = drafted + undrafted
    places = Need(
        wanted / scaling.sessions_per_replica,
        f"{wanted:.1f} sessions want drafts ({undrafted:.1f} have no drafter), {scaling.sessions_per_replica:g} each",
    )
    late = max((report.late for report in drafters), default=0.0)
    waiting = max(report.waiting for report in targets)
    shared = sum(report.shared for report in drafters)
    work = min(wanted, shared / ROOM * (wanted / drafted if drafted else 1.0))  # a session has one drafter at most
    felt = f"{late:.0%} of the blocks late, {waiting:.0%} of a target's time waiting"
    if max(late, waiting) <= IN_TIME:
        work = min(work, present)  # drafters keep up, so no more are needed
    return _largest(places, Need(work, f"drafters busy with more than one session for {shared:.2f} of them, {felt}"))


def coupled_need(targets: int | None, per_target: float) -> Need | None:
    """Returns the need of a draft pool that follows only the size of the target pool; None while that is unknown."""
    if targets is None:
        return None
    return Need(per_target * targets, f"{per_target:g} for each of {targets} target replicas")


def _largest(*needs: Need) -> Need:
    return max(needs, key=lambda need: need.replicas)


def _places(reports: Sequence[TargetReport], scaling: TargetScaling) -> Need:
    """Returns the need by sessions; speculation lets a replica serve more at the same speed, up to `max_sessions`."""
    load = 0.0
    for report in reports:
        aim = min(scaling.max_sessions, scaling.sessions_per_replica * max(1.0, report.gain))
        load += (report.running + report.queued) / aim
    running = sum(report.running for report in reports)
    queued = sum(report.queued for report in reports)
    gain = max(report.gain for report in reports)
    each = f"{scaling.sessions_per_replica:g} each without speculation, whose gain is {gain:.2f}"
    return Need(load, f"{running:.1f} sessions run and {queued:.1f} queue, {each}")


def _cache(reports: Sequence[TargetReport]) -> Need:
    held = sum(report.cache for report in reports)
    return Need(held / CACHE_FULL, f"sessions hold the pages of {held:.2f} replicas")


def _prompts(reports: Sequence[TargetReport], scaling: TargetScaling, present: int) -> Need:
    """Returns the need by the time to first token, at most one replica for each prompt that waits at the same time.

    Replicas are given back once the time is so short that fewer keep it within bounds.
    """
    unread = sum(report.unread for report in reports)
    wait_s = max(max(report.first_token_s, report.backlog_s) for report in reports)
    over = wait_s / scaling.first_token_s
    enough = len(reports) * over if over > 1 else min(present, len(reports) * over / ROOM)
    return Need(min(unread, enough), f"{unread:.1f} prompts wait at once, {wait_s:.1f} s for their first tokens")
