"""The policy that Ray Serve calls: for the whole application, or for a single deployment.

It knows only those attributes of Serve's types that it reads. Serve's own delays and factors are left neutral.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from cluster.autoscaling.demand import DraftScaling, TargetScaling
from cluster.autoscaling.pools import Pool, PoolDecision, decide_drafters, decide_targets, stay
from cluster.autoscaling.reports import DraftReport, TargetReport, reported
from cluster.autoscaling.settings import told
from cluster.autoscaling.stabilization_window import Wishes

TARGET = "target"
DRAFT = "draft"
POOLS = {"Target": TARGET, "Drafter": DRAFT}  # by deployment


class Observed(Protocol):
    """The attributes of Serve's AutoscalingContext that are read here."""

    deployment_name: str
    aggregated_metrics: Mapping[str, Mapping[Any, float]]  # by name and replica
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    current_time: float
    policy_state: Mapping[str, Any]


Decisions = tuple[dict[Any, int], dict[Any, dict[str, Any]]]


class PoolsPolicy:
    """Policy of the application, with both pools visible. Target replicas report how the pools should scale."""

    def __call__(self, observed: Mapping[Any, Observed]) -> Decisions:
        """Returns sizes and policy states by deployment; none for deployments that are not pools."""
        named = {one.deployment_name: (key, one) for key, one in observed.items()}
        pools = {POOLS[name]: found for name, found in named.items() if name in POOLS}
        decided: dict[Any, PoolDecision] = {}
        metrics: Mapping[str, Mapping[Any, float]] = {}
        targets: list[TargetReport] = []
        target_size: int | None = None
        if TARGET in pools:
            key, one = pools[TARGET]
            metrics = one.aggregated_metrics
            targets = reported(TargetReport, metrics)
            scaling = told(TargetScaling, TARGET, metrics)
            now = one.current_time
            decided[key] = decide_targets(_pool(one), targets, scaling, now) if scaling else stay(_pool(one), now)
            target_size = decided[key].size
        if DRAFT in pools:
            key, one = pools[DRAFT]
            decided[key] = _drafters(one, told(DraftScaling, DRAFT, metrics), targets, target_size)
        sizes = {key: decision.size for key, decision in decided.items()}
        return sizes, {key: {"wishes": decision.wishes} for key, decision in decided.items()}


class PoolAlone:
    """Policy of a single deployment where Serve does not use `PoolsPolicy`: targets still scale, drafters stay."""

    def __call__(self, observed: Observed) -> tuple[int, dict[str, Any]]:
        """Returns the wanted size and the policy state."""
        assert observed.deployment_name in POOLS, f"a policy for {observed.deployment_name}, expected {set(POOLS)}"
        sizes, states = PoolsPolicy()({"": observed})
        return sizes[""], states[""]


def _drafters(
    one: Observed, scaling: DraftScaling | None, targets: list[TargetReport], target_size: int | None
) -> PoolDecision:
    pool = _pool(one)
    if scaling is None:
        return stay(pool, one.current_time)
    reports = reported(DraftReport, one.aggregated_metrics)
    return decide_drafters(pool, reports, scaling, targets, target_size, one.current_time)


def _pool(observed: Observed) -> Pool:
    wishes: Wishes | None = observed.policy_state.get("wishes")
    least = observed.capacity_adjusted_min_replicas
    return Pool(observed.target_num_replicas, least, observed.capacity_adjusted_max_replicas, wishes)
