"""Table of `slipstream status` about pool sizes: how many replicas each pool needs now, and why.

The policy is applied to the latest report of each replica. Serve's controller, which decides, averages over seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from cluster.autoscaling.demand import DraftScaling, TargetScaling
from cluster.autoscaling.pools import Pool, PoolDecision, decide_drafters, decide_targets
from cluster.autoscaling.reports import DraftReport, TargetReport
from cluster.autoscaling.serve_policy import DRAFT, POOLS, TARGET
from serve_app.operations.ray_cluster import ClusterError
from serve_app.tables import table

Inspected = Sequence[Mapping[str, Any]]
Bounds = Mapping[str, tuple[int, int]]  # (least, most) replicas by deployment, for pools only


def told_bounds(details: Mapping[str, Any]) -> Bounds:
    """Reads the bounds from Serve's details of an application.

    Raises ClusterError if a pool is missing, which means that it has ended.
    """
    deployments = details.get("deployments", {})
    if missing := [name for name in POOLS if name not in deployments]:
        raise ClusterError(f"Serve knows no {' and no '.join(missing)} of it any more")
    found = {name: deployments[name]["deployment_config"]["autoscaling_config"] for name in POOLS}
    return {name: (one["min_replicas"], one["max_replicas"]) for name, one in found.items()}


def pools_table(targets: Inspected, drafters: Inspected, bounds: Bounds) -> Table:
    """Tabulates the pools from what replicas answer to `inspect`; targets report the scaling settings of both."""
    made = table("Pools", "pool", "replicas", "bounds", "needed", "why")
    if not targets:
        return made
    settings = targets[0]["scaling"]
    reports = [TargetReport(**one["report"]) for one in targets]
    scaling = TargetScaling(**settings[TARGET])
    wanted = decide_targets(Pool(len(targets), *bounds["Target"]), reports, scaling, 0.0)
    _add(made, "targets", bounds["Target"], targets, wanted)
    follows = DraftScaling(**settings[DRAFT])
    own = [DraftReport(**one["report"]) for one in drafters]
    pool = Pool(len(drafters), *bounds["Drafter"])
    drafts = decide_drafters(pool, own, follows, reports, wanted.wished, 0.0)
    _add(made, "drafters", bounds["Drafter"], drafters, drafts)
    return made


def _add(made: Table, name: str, bounds: tuple[int, int], replicas: Inspected, wanted: PoolDecision) -> None:
    made.add_row(name, str(len(replicas)), f"{bounds[0]} to {bounds[1]}", str(wanted.wished), wanted.why)
