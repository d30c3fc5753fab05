"""The policy as Ray Serve calls it: for the whole application, or for a pool alone where Serve was told no more.

Knows of Serve's types only the attributes that it reads. Serve's own delays and factors are left at nothing.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from cluster.autoscaling.needs import DraftScaling, TargetScaling
from cluster.autoscaling.pools import Pool, PoolDecision, decide_drafters, decide_targets
from cluster.autoscaling.reports import DraftReport, TargetReport, reported
from cluster.autoscaling.steadiness import Wishes

TARGET = "target"  # which pool a deployment is, as its policy's arguments say
DRAFT = "draft"


class Policy(Protocol):
    policy_kwargs: Mapping[str, Any]


class ScalingConfig(Protocol):
    policy: Policy


class Observed(Protocol):
    """The part of Serve's AutoscalingContext that is read here."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]]  # by name and replica
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    current_time: float
    policy_state: Mapping[str, Any]
    config: ScalingConfig


Decisions = tuple[dict[Any, int], dict[Any, dict[str, Any]]]


class PoolsPolicy:
    """Of the application: sees both pools. How each scales is in the arguments of its own deployment's policy."""

    def __call__(self, observed: Mapping[Any, Observed]) -> Decisions:
        """Sizes, and what is remembered, by deployment; of those that are no pools, nothing."""
        pools = {kind: (name, one) for name, one in observed.items() for kind in one.config.policy.policy_kwargs}
        decided: dict[Any, PoolDecision] = {}
        targets: list[TargetReport] = []
        target_size: int | None = None
        if TARGET in pools:
            name, one = pools[TARGET]
            targets = reported(TargetReport, one.aggregated_metrics)
            scaling = TargetScaling(**one.config.policy.policy_kwargs[TARGET])
            decided[name] = decide_targets(_pool(one), targets, scaling, one.current_time)
            target_size = decided[name].size
        if DRAFT in pools:
            name, one = pools[DRAFT]
            drafters = reported(DraftReport, one.aggregated_metrics)
            follows = DraftScaling(**one.config.policy.policy_kwargs[DRAFT])
            decided[name] = decide_drafters(_pool(one), drafters, follows, targets, target_size, one.current_time)
        sizes = {name: decision.size for name, decision in decided.items()}
        return sizes, {name: {"wishes": decision.wishes} for name, decision in decided.items()}


class PoolAlone:
    """Of one deployment, where Serve was not told of `PoolsPolicy`: targets scale all the same, drafters stay.

    Serve hands over the same arguments to both: `target` or `draft`, with the settings of that pool.
    """

    def __init__(self, **pool: Mapping[str, Any]) -> None:
        assert pool.keys() <= {TARGET, DRAFT}, f"a policy for {set(pool)}, expected {TARGET} or {DRAFT}"

    def __call__(self, observed: Observed) -> tuple[int, dict[str, Any]]:
        """The size wanted, and what is remembered."""
        sizes, states = PoolsPolicy()({"": observed})
        return sizes[""], states[""]


def _pool(observed: Observed) -> Pool:
    wishes: Wishes | None = observed.policy_state.get("wishes")
    least = observed.capacity_adjusted_min_replicas
    return Pool(observed.target_num_replicas, least, observed.capacity_adjusted_max_replicas, wishes)
