"""Tests the policy through Serve's interface."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.autoscaling import (
    DRAFTER,
    TARGET,
    DraftReport,
    DraftScaling,
    Observed,
    PoolAlone,
    PoolsPolicy,
    TargetReport,
    TargetScaling,
    as_numbers,
)

AT_ONCE = {"up_delay_s": 0.0, "down_delay_s": 0.0}
TARGETS = TargetScaling(sessions_per_replica=8, max_sessions=16, first_token_s=2.0, **AT_ONCE)
DRAFTERS = DraftScaling(sessions_per_replica=32, per_target=None, **AT_ONCE)
COUPLED = DraftScaling(sessions_per_replica=32, per_target=2.0, **AT_ONCE)
SETTINGS = as_numbers({TARGET: asdict(TARGETS), DRAFTER: asdict(DRAFTERS)})


def observed(
    deployment: str,
    *reports: dict[str, float],
    size: int = 1,
    bounds: tuple[int, int] = (1, 4),
    now: float = 0,
) -> Observed:
    """Returns the policy's input; `reports` has one item per replica."""
    names = reports[0] if reports else ()
    return SimpleNamespace(
        deployment_name=deployment,
        aggregated_metrics={name: {at: one[name] for at, one in enumerate(reports)} for name in names},
        target_num_replicas=size,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
        current_time=now,
        policy_state={},
    )


def targets(
    *reports: TargetReport, scaling: TargetScaling = TARGETS, drafts: DraftScaling = DRAFTERS, **more: Any
) -> Observed:
    """Returns target replicas that also report the scaling settings of both pools."""
    settings = as_numbers({TARGET: asdict(scaling), DRAFTER: asdict(drafts)})
    return observed("Target", *({**asdict(report), **settings} for report in reports), **more)


def drafters(*reports: DraftReport, **more: Any) -> Observed:
    return observed("Drafter", *(asdict(report) for report in reports), **more)


BUSY = TargetReport(running=16, queued=8, drafted=16, undrafted=50)


def test_both_pools_are_sized_from_the_reports_of_both() -> None:
    seen = {"T": targets(BUSY), "D": drafters(DraftReport())}
    sizes, _ = PoolsPolicy()(seen)
    assert sizes == {"T": 3, "D": 3}


def test_sizes_stay_within_the_bounds() -> None:
    seen = {"T": targets(BUSY, bounds=(1, 2)), "D": drafters(DraftReport(), bounds=(4, 5))}
    assert PoolsPolicy()(seen)[0] == {"T": 2, "D": 4}


def test_without_reports_sizes_stay() -> None:
    """A controller without reports must not shrink a busy pool."""
    seen = {"T": targets(size=3), "D": drafters(size=2, bounds=(0, 4))}
    assert PoolsPolicy()(seen)[0] == {"T": 3, "D": 2}


def test_a_coupled_draft_pool_follows_the_new_target_size() -> None:
    seen = {"T": targets(BUSY, drafts=COUPLED), "D": drafters(DraftReport(), bounds=(0, 9))}
    assert PoolsPolicy()(seen)[0] == {"T": 3, "D": 6}


@pytest.mark.parametrize(("ratio", "before", "after"), [(1.0, 4, 1), (2.0, 8, 2), (0.5, 2, 1)])
def test_a_coupled_draft_pool_keeps_its_ratio_when_targets_shrink(ratio: float, before: int, after: int) -> None:
    coupled = DraftScaling(sessions_per_replica=32, per_target=ratio, **AT_ONCE)
    idle = targets(TargetReport(), drafts=coupled, size=4)
    seen = {"T": idle, "D": drafters(DraftReport(), size=before, bounds=(0, 16))}
    sizes: dict[Any, int] = {}
    for now in (0.0, 1.0):  # the pools still need their sizes until the first decision
        for pool in seen.values():
            pool.current_time = now
        sizes, states = PoolsPolicy()(seen)
        for name, pool in seen.items():
            pool.policy_state, pool.target_num_replicas = states[name], sizes[name]
    assert sizes == {"T": 1, "D": after}


def test_the_policy_state_round_trips() -> None:
    slow = TargetScaling(sessions_per_replica=8, max_sessions=16, first_token_s=2.0, up_delay_s=10, down_delay_s=300)
    policy = PoolsPolicy()
    first = targets(BUSY, scaling=slow)
    sizes, states = policy({"T": first})
    assert sizes == {"T": 1}
    later = targets(BUSY, scaling=slow, now=10)
    later.policy_state = states["T"]
    assert policy({"T": later})[0] == {"T": 3}


def test_alone_the_target_pool_scales_and_the_draft_pool_stays() -> None:
    """Targets report the demand for drafters."""
    assert PoolAlone()(targets(BUSY))[0] == 3
    assert PoolAlone()(drafters(DraftReport(shared=1.0, late=1.0), size=2))[0] == 2


def test_a_policy_of_no_pool_is_refused() -> None:
    with pytest.raises(AssertionError, match="Router"):
        PoolAlone()(observed("Router"))


def test_the_latest_reported_settings_apply() -> None:
    """Running replicas receive new settings."""
    policy = PoolsPolicy()
    few = TargetScaling(sessions_per_replica=24, max_sessions=32, first_token_s=2.0, **AT_ONCE)
    assert policy({"T": targets(BUSY)})[0] == {"T": 3}
    assert policy({"T": targets(BUSY, scaling=few)})[0] == {"T": 1}


def test_differing_settings_are_taken_from_one_replica() -> None:
    small = TargetScaling(sessions_per_replica=1, max_sessions=2, first_token_s=7.0, **AT_ONCE)
    numbers = [as_numbers({TARGET: asdict(one), DRAFTER: asdict(DRAFTERS)}) for one in (TARGETS, small)]
    seen = observed("Target", *({**asdict(BUSY), **one} for one in numbers), bounds=(1, 99))
    assert PoolsPolicy()({"T": seen})[0] == {"T": 48}


@pytest.mark.parametrize("missing", SETTINGS)
def test_incomplete_settings_of_a_replica_are_ignored(missing: str) -> None:
    seen = {"T": targets(BUSY, BUSY, size=2), "D": drafters(DraftReport(), size=2)}
    sizes = PoolsPolicy()(seen)[0]
    del seen["T"].aggregated_metrics[missing][1]
    assert PoolsPolicy()(seen)[0] == sizes


@pytest.mark.parametrize("missing", SETTINGS)
def test_a_pool_without_complete_settings_keeps_its_size_alone(missing: str) -> None:
    seen = {TARGET: targets(BUSY, size=2), DRAFTER: drafters(DraftReport(), size=2)}
    seen[TARGET].aggregated_metrics[missing].clear()
    assert PoolsPolicy()(seen)[0] == {TARGET: 3, DRAFTER: 3} | {missing.partition("_")[0]: 2}


def test_a_draft_pool_follows_the_sum_of_the_models_that_it_serves() -> None:
    """Each target pool follows its own load; a pool that reports another draft pool does not count."""

    def model(name: str, drafter: str, undrafted: float, drafts: DraftScaling) -> Observed:
        settings = as_numbers({name: asdict(TARGETS), drafter: asdict(drafts)})
        return observed(name, {**asdict(TargetReport(running=undrafted, undrafted=undrafted)), **settings})

    loads = {"Target-a": ("Drafter", 24), "Target-b": ("Drafter", 16), "Target-c": ("Drafter-other", 32)}
    for drafts, expected in ((DRAFTERS, 2), (COUPLED, 10)):
        seen = {name: model(name, drafter, load, drafts) for name, (drafter, load) in loads.items()}
        seen["Drafter"] = drafters(DraftReport(), bounds=(0, 20))
        assert PoolsPolicy()(seen)[0] == {"Target-a": 3, "Target-b": 2, "Target-c": 4, "Drafter": expected}


def test_narrower_bounds_apply_without_reports() -> None:
    assert PoolsPolicy()({"T": targets(size=3, bounds=(1, 2))})[0] == {"T": 2}
