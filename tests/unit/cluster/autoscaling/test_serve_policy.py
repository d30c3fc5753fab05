"""The policy as Serve calls it."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.autoscaling import PoolAlone, PoolsPolicy
from cluster.autoscaling.needs import DraftScaling, TargetScaling
from cluster.autoscaling.reports import DraftReport, TargetReport
from cluster.autoscaling.serve_policy import DRAFT, TARGET, Observed

AT_ONCE = {"up_delay_s": 0.0, "down_delay_s": 0.0}
TARGETS = TargetScaling(sessions_per_replica=8, max_sessions=16, first_token_s=2.0, **AT_ONCE)
DRAFTERS = DraftScaling(sessions_per_replica=32, per_target=None, **AT_ONCE)
COUPLED = DraftScaling(sessions_per_replica=32, per_target=2.0, **AT_ONCE)


def observed(
    scaling: TargetScaling | DraftScaling,
    *reports: Any,
    size: int = 1,
    bounds: tuple[int, int] = (1, 4),
    now: float = 0,
) -> Observed:
    kind = TARGET if isinstance(scaling, TargetScaling) else DRAFT
    names = asdict(reports[0]) if reports else ()
    return SimpleNamespace(
        aggregated_metrics={name: {at: getattr(one, name) for at, one in enumerate(reports)} for name in names},
        target_num_replicas=size,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
        current_time=now,
        policy_state={},
        config=SimpleNamespace(policy=SimpleNamespace(policy_kwargs={kind: asdict(scaling)})),
    )


BUSY = TargetReport(running=16, queued=8, drafted=16, undrafted=50)


def test_both_pools_are_sized_by_what_either_reports() -> None:
    seen = {"T": observed(TARGETS, BUSY), "D": observed(DRAFTERS, DraftReport())}
    sizes, _ = PoolsPolicy()(seen)
    assert sizes == {"T": 3, "D": 3}


def test_bounds_hold() -> None:
    seen = {"T": observed(TARGETS, BUSY, bounds=(1, 2)), "D": observed(DRAFTERS, DraftReport(), bounds=(4, 5))}
    assert PoolsPolicy()(seen)[0] == {"T": 2, "D": 4}


def test_silence_changes_nothing() -> None:
    """A controller that has lost its reports must not shrink a busy pool."""
    seen = {"T": observed(TARGETS, size=3), "D": observed(DRAFTERS, size=2, bounds=(0, 4))}
    assert PoolsPolicy()(seen)[0] == {"T": 3, "D": 2}


def test_a_coupled_draft_pool_follows_the_size_that_the_target_pool_gets() -> None:
    seen = {"T": observed(TARGETS, BUSY), "D": observed(COUPLED, DraftReport(), bounds=(0, 9))}
    assert PoolsPolicy()(seen)[0] == {"T": 3, "D": 6}


def test_what_is_remembered_comes_back() -> None:
    slow = TargetScaling(sessions_per_replica=8, max_sessions=16, first_token_s=2.0, up_delay_s=10, down_delay_s=300)
    policy = PoolsPolicy()
    first = observed(slow, BUSY)
    sizes, states = policy({"T": first})
    assert sizes == {"T": 1}
    later = observed(slow, BUSY, now=10)
    later.policy_state = states["T"]
    assert policy({"T": later})[0] == {"T": 3}


def test_alone_the_target_pool_scales_and_the_draft_pool_stays() -> None:
    """What is asked of drafters is told by targets."""
    assert PoolAlone(target=asdict(TARGETS))(observed(TARGETS, BUSY))[0] == 3
    for scaling in (DRAFTERS, COUPLED):
        assert PoolAlone(draft=asdict(scaling))(observed(scaling, DraftReport(shared=1.0, late=1.0), size=2))[0] == 2


def test_a_policy_of_no_pool_is_refused() -> None:
    with pytest.raises(AssertionError, match="router"):
        PoolAlone(router={})
