"""Sizes of both pools: each one's need, within its bounds, once the need has lasted long enough."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.autoscaling.demand import DraftScaling, Need, TargetScaling, coupled_need, draft_need, target_need
from cluster.autoscaling.reports import DraftReport, TargetReport
from cluster.autoscaling.stabilization_window import Wishes


@dataclass(frozen=True)
class Pool:
    """A pool's current state: its size including starting replicas, its bounds, and its earlier needs."""

    size: int
    least: int
    most: int
    wishes: Wishes | None = None  # None: no history


@dataclass(frozen=True)
class PoolDecision:
    """The size that a pool should have."""

    size: int  # now
    wished: int  # size to have once the need has lasted long enough
    why: str
    wishes: Wishes = field(default_factory=Wishes)


def decide_targets(pool: Pool, reports: Sequence[TargetReport], scaling: TargetScaling, now: float) -> PoolDecision:
    """Decides the size of the target pool."""
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
    """Decides the size of the draft pool after that of the target pool; `target_size` is None if that pool is not
    visible."""
    if scaling.per_target is None:
        need = draft_need(targets, reports, scaling, pool.size)
    else:
        need = coupled_need(target_size, scaling.per_target)
    return _decide(pool, need, now, scaling.up_delay_s, scaling.down_delay_s)


def stay(pool: Pool, now: float) -> PoolDecision:
    """Keeps a pool at its size, within its bounds, while no replica has reported how it should scale."""
    return _decide(pool, None, now, 0.0, 0.0)


def _decide(pool: Pool, need: Need | None, now: float, up_delay_s: float, down_delay_s: float) -> PoolDecision:
    """Decides a pool's size. Without reports the size stays, because losing the reports must not shrink the pool."""
    need = need or Need(pool.size, "no target replica has reported")
    wished = min(max(need.size(pool.size), pool.least), pool.most)
    wishes = (pool.wishes or Wishes.at_start(pool.size, now)).after(wished, now)
    size = wishes.size(pool.size, now, up_delay_s, down_delay_s)
    return PoolDecision(min(max(size, pool.least), pool.most), wished, need.why, wishes)
