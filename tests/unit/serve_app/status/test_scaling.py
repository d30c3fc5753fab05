"""Tests the pool sizes in `slipstream status`."""

from dataclasses import asdict

import pytest

from cluster.autoscaling import DraftReport, TargetReport
from cluster.config import DraftPool, DraftReplicas, ModelConfig, SlipstreamConfig, TargetPool, TargetReplicas
from cluster.placement import autoscaling_config, scaling_settings
from serve_app.operations.ray_cluster import ClusterError
from serve_app.status import deployed_bounds, pools_table

TARGETS = TargetPool(max_sessions=16, replicas=TargetReplicas(max=4))
DRAFTERS = DraftPool(method="ngram", max_sessions=4, replicas=DraftReplicas(min=0, max=2))
CONFIG = SlipstreamConfig(model=ModelConfig(target="t"), target=TARGETS, draft=DRAFTERS)
SCALING = scaling_settings(CONFIG.served[0])
OPTIONS = {
    "Target": {"autoscaling_config": autoscaling_config(TARGETS.replicas)},
    "Drafter": {"autoscaling_config": autoscaling_config(DRAFTERS.replicas)},
    "Router": {"num_replicas": 1},
}
DETAILS = {"deployments": {name: {"deployment_config": one} for name, one in OPTIONS.items()}}
BOUNDS = deployed_bounds(DETAILS)


def test_each_pool_shows_its_demand_and_reason() -> None:
    target = {"report": asdict(TargetReport(running=16, queued=1, drafted=4, undrafted=12)), "scaling": SCALING}
    drafter = {"report": asdict(DraftReport(shared=0.1))}
    made = pools_table({"Target": [target], "Drafter": [drafter]}, BOUNDS)
    pools, replicas, bounds, needed, why = ([str(cell) for cell in column.cells] for column in made.columns)
    assert pools == ["Target", "Drafter"]
    assert replicas == ["1", "1"]
    assert bounds == ["1 to 4", "0 to 2"]
    assert needed == ["3", "2"]
    assert why[0].startswith("16.0 sessions run and 1.0 queue")
    assert why[1].startswith("16.0 sessions want drafts (12.0 have no drafter)")


def test_an_empty_draft_pool_is_shown() -> None:
    made = pools_table({"Target": [{"report": asdict(TargetReport()), "scaling": SCALING}], "Drafter": []}, BOUNDS)
    assert [str(cell) for cell in made.columns[3].cells] == ["1", "0"]


@pytest.mark.parametrize("pool", ["Target", "Drafter"])
def test_a_pool_that_has_ended_is_named(pool: str) -> None:
    left = {name: one for name, one in DETAILS["deployments"].items() if name != pool}
    with pytest.raises(ClusterError, match=f"no longer lists its {pool}"):
        deployed_bounds({"deployments": left})


def test_a_draft_pool_shows_the_demand_of_all_its_models() -> None:
    models = {name: {"model": {"target": name}, "target": TARGETS} for name in ("a", "b")}
    served = SlipstreamConfig(models=models, draft=DRAFTERS).served
    report = asdict(TargetReport(running=3, undrafted=2))
    replicas = {one.target: [{"report": report, "scaling": scaling_settings(one)}] for one in served}
    limits = dict.fromkeys(("Target-a", "Target-b", "Drafter"), (1, 4))
    made = pools_table(replicas, limits)
    assert [str(cell) for cell in made.columns[0].cells] == ["Target-a", "Target-b", "Drafter"]
    assert "4.0 sessions want drafts" in list(made.columns[4].cells)[2]
