"""Tests the pool sizes in `slipstream status`."""

from dataclasses import asdict

import pytest

from cluster.autoscaling import DraftReport, TargetReport
from cluster.config import DraftPool, DraftReplicas, TargetPool, TargetReplicas
from cluster.placement import bounds, scaling_settings
from serve_app.operations.ray_cluster import ClusterError
from serve_app.status import deployed_bounds, pools_table

TARGETS = TargetPool(max_sessions=16, replicas=TargetReplicas(max=4))
DRAFTERS = DraftPool(method="ngram", max_sessions=4, replicas=DraftReplicas(min=0, max=2))
SCALING = scaling_settings(TARGETS, DRAFTERS)
OPTIONS = {
    "Target": {"autoscaling_config": bounds(TARGETS.replicas)},
    "Drafter": {"autoscaling_config": bounds(DRAFTERS.replicas)},
    "Router": {"num_replicas": 1},
}
DETAILS = {"deployments": {name: {"deployment_config": one} for name, one in OPTIONS.items()}}
BOUNDS = deployed_bounds(DETAILS)


def test_each_pool_shows_its_demand_and_reason() -> None:
    target = {"report": asdict(TargetReport(running=16, queued=1, drafted=4, undrafted=12)), "scaling": SCALING}
    drafter = {"report": asdict(DraftReport(shared=0.1))}
    made = pools_table([target], [drafter], BOUNDS)
    pools, replicas, bounds, needed, why = ([str(cell) for cell in column.cells] for column in made.columns)
    assert pools == ["targets", "drafters"]
    assert replicas == ["1", "1"]
    assert bounds == ["1 to 4", "0 to 2"]
    assert needed == ["3", "2"]
    assert why[0].startswith("16.0 sessions run and 1.0 queue")
    assert why[1].startswith("16.0 sessions want drafts (12.0 have no drafter)")


def test_an_empty_draft_pool_is_shown() -> None:
    made = pools_table([{"report": asdict(TargetReport()), "scaling": SCALING}], [], BOUNDS)
    assert [str(cell) for cell in made.columns[3].cells] == ["1", "0"]


@pytest.mark.parametrize("pool", ["Target", "Drafter"])
def test_a_pool_that_has_ended_is_named(pool: str) -> None:
    left = {name: one for name, one in DETAILS["deployments"].items() if name != pool}
    with pytest.raises(ClusterError, match=f"no longer lists its {pool}"):
        deployed_bounds({"deployments": left})
