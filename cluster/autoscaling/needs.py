"""What each pool needs by what is asked of it: pure arithmetic, and a reason to show.

A need is in replicas, and may be a fraction. The largest one counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.autoscaling.reports import DraftReport, TargetReport

ROOM = 0.5  # how full a pool is to be, by default: twice the load finds places while further replicas start
CACHE_FULL = 0.8  # share of the pages that sessions may hold: beyond it the next long one has others preempted
IN_TIME = 0.125  # share of blocks, or of a target's time, that may be lost: below it drafters themselves take more
# More than is needed that a smaller pool must do for: fewer replicas are slower, so sessions stay longer and are more.
SPARE = 0.25


@dataclass(frozen=True)
class TargetScaling:
    """How the target pool follows its load."""

    sessions_per_replica: float  # of a replica without speculation
    max_sessions: float  # that a replica has places for
    first_token_s: float  # beyond which a replica more is to be had for prompts that wait for one another
    up_delay_s: float
    down_delay_s: float


@dataclass(frozen=True)
class DraftScaling:
    """How the draft pool follows what is asked of it, or the target pool."""

    sessions_per_replica: float
    up_delay_s: float
    down_delay_s: float
    per_target: float | None = None  # drafters for each target replica, whatever is asked of them; None: by need


@dataclass(frozen=True)
class Need:
    """Of one pool."""

    replicas: float
    why: str

    def size(self, present: int) -> int:
        """As many as are needed, but fewer than at present only if those are enough with some to spare."""
        enough = math.ceil(self.replicas)
        return enough if enough > present else min(present, math.ceil(self.replicas * (1 + SPARE)))


def target_need(reports: Sequence[TargetReport], scaling: TargetScaling, present: int) -> Need | None:
    """Of the target pool with `present` replicas; None while none of them has reported."""
    if not reports:
        return None
    return _largest(_places(reports, scaling), _cache(reports), _prompts(reports, scaling, present))


def draft_need(
    targets: Sequence[TargetReport], drafters: Sequence[DraftReport], scaling: DraftScaling, present: int
) -> Need | None:
    """Of the draft pool with `present` replicas; None while no target has reported: what is asked is not known.

    What a session lacks a drafter for, because there is none or because drafters turned it away, counts as what is
    drafted for, so that a pool can come back from nothing, and one that sheds sessions grows.
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
        work = min(work, present)  # they follow
    return _largest(places, Need(work, f"drafters busy with more than one session for {shared:.2f} of them, {felt}"))


def coupled_need(targets: int | None, per_target: float) -> Need | None:
    """Of a draft pool that follows the target pool's size alone; None while that is not known."""
    if targets is None:
        return None
    return Need(per_target * targets, f"{per_target:g} for each of {targets} target replicas")


def _largest(*needs: Need) -> Need:
    return max(needs, key=lambda need: need.replicas)


def _places(reports: Sequence[TargetReport], scaling: TargetScaling) -> Need:
    """By sessions. With speculation a replica serves more of them at the same speed, as far as it has places."""
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
    """By the time to first token; a replica for each prompt that waits at once is enough, whatever one of them takes.

    Replicas that are no longer needed are given back once the time is so short that fewer keep it within bounds.
    """
    unread = sum(report.unread for report in reports)
    wait_s = max(max(report.first_token_s, report.backlog_s) for report in reports)
    over = wait_s / scaling.first_token_s
    enough = len(reports) * over if over > 1 else min(present, len(reports) * over / ROOM)
    return Need(min(unread, enough), f"{unread:.1f} prompts wait at once, {wait_s:.1f} s for their first tokens")
