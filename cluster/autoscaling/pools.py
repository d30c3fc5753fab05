"""The two pools together: what each needs, within its bounds, once it has needed it for long enough."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.autoscaling.needs import DraftScaling, Need, TargetScaling, coupled_need, draft_need, target_need
from cluster.autoscaling.reports import DraftReport, TargetReport
from cluster.autoscaling.steadiness import Wishes


@dataclass(frozen=True)
class Pool:
    """A pool as it is: its size, counting replicas that start, its bounds, and what was wished of it before."""

    size: int
    least: int
    most: int
    wishes: Wishes | None = None  # None: nothing is remembered


@dataclass(frozen=True)
class PoolDecision:
    """What a pool is to have."""

    size: int  # now
    wished: int  # once it has been for long enough
    why: str
    wishes: Wishes = field(default_factory=Wishes)


def decide_targets(pool: Pool, reports: Sequence[TargetReport], scaling: TargetScaling, now: float) -> PoolDecision:
    """The target pool's size."""
    need = target_need(reports, scaling, pool.size)
    return _decide(pool, need, now, scaling.up_delay_s, scaling.down_delay_s)


def decide_drafters(
    pool: Pool,
    reports: Sequence[DraftReport],
    scaling: DraftScaling,
    targets: Sequence[TargetReport],
    target_size: int | None,
    now: float,
) -> PoolDecision:
    """The draft pool's size, once the target pool's is decided; None: the target pool is not seen."""
    if scaling.per_target is None:
        need = draft_need(targets, reports, scaling, pool.size)
    else:
        need = coupled_need(target_size, scaling.per_target)
    return _decide(pool, need, now, scaling.up_delay_s, scaling.down_delay_s)


def stay(pool: Pool, now: float) -> PoolDecision:
    """While nobody has told how it is to scale: within its bounds, as it is."""
    return _decide(pool, None, now, 0.0, 0.0)


def _decide(pool: Pool, need: Need | None, now: float, up_delay_s: float, down_delay_s: float) -> PoolDecision:
    """A pool that nothing is heard of stays: who has lost the reports must not shrink it."""
    need = need or Need(pool.size, "no target replica has reported")
    wished = min(max(need.size(pool.size), pool.least), pool.most)
    wishes = (pool.wishes or Wishes.at_start(pool.size, now)).after(wished, now)
    size = wishes.size(pool.size, now, up_delay_s, down_delay_s)
    return PoolDecision(min(max(size, pool.least), pool.most), wished, need.why, wishes)
