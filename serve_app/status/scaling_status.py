"""What `slipstream status` shows of the pools' sizes: what each needs by now, and why.

By the policy itself, over the latest report of each replica; Serve's controller, which decides, has means over seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from cluster.autoscaling.needs import DraftScaling, TargetScaling
from cluster.autoscaling.pools import Pool, PoolDecision, decide_drafters, decide_targets
from cluster.autoscaling.reports import DraftReport, TargetReport
from cluster.autoscaling.serve_policy import DRAFT, TARGET
from serve_app.bench.tables import table

Inspected = Sequence[Mapping[str, Any]]


def pools_table(targets: Inspected, drafters: Inspected, routers: Inspected) -> Table:
    """Of what replicas answer to `inspect`; the routers know how the pools are to scale."""
    made = table("Pools", "pool", "replicas", "bounds", "needed", "why")
    if not routers:
        return made
    settings = routers[0]["pools"]
    reports = [TargetReport(**one["report"]) for one in targets]
    scaling = TargetScaling(**_arguments(settings[TARGET])[TARGET])
    wanted = decide_targets(_pool(settings[TARGET], targets), reports, scaling, 0.0)
    _add(made, "targets", settings[TARGET], targets, wanted)
    follows = DraftScaling(**_arguments(settings[DRAFT])[DRAFT])
    own = [DraftReport(**one["report"]) for one in drafters]
    drafts = decide_drafters(_pool(settings[DRAFT], drafters), own, follows, reports, wanted.wished, 0.0)
    _add(made, "drafters", settings[DRAFT], drafters, drafts)
    return made


def _arguments(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments: Mapping[str, Any] = settings["policy"]["policy_kwargs"]
    return arguments


def _pool(settings: Mapping[str, Any], replicas: Inspected) -> Pool:
    return Pool(len(replicas), settings["min_replicas"], settings["max_replicas"])


def _add(made: Table, name: str, settings: Mapping[str, Any], replicas: Inspected, wanted: PoolDecision) -> None:
    bounds = f"{settings['min_replicas']} to {settings['max_replicas']}"
    made.add_row(name, str(len(replicas)), bounds, str(wanted.wished), wanted.why)
