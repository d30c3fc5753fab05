"""Tests the resources that pools require of a machine."""

from typing import Any

import pytest

from cluster.config import SlipstreamConfig, validated
from cluster.errors import ConfigError
from serve_app.operations.checks import check_resources, demand


def config(**target: Any) -> SlipstreamConfig:
    draft = {"method": "ngram", "replicas": {"min": 1, "max": 3}, "resources": {"num_cpus": 0.5}}
    return validated({"model": {"target": "t"}, "target": target, "draft": draft})


def test_demand_counts_ranks_coordinators_drafters_and_routers() -> None:
    pools = config(tensor_parallel=3, replicas={"min": 1, "max": 2})
    assert demand(pools, lambda replicas: replicas.min) == {"CPU": pytest.approx(3 + 0.1 + 0.5 + 0.1)}
    assert demand(pools, lambda replicas: replicas.max) == {"CPU": pytest.approx(2 * 3.1 + 3 * 0.5 + 0.1)}


def learning(**resources: Any) -> SlipstreamConfig:
    draft = {"model": "d", "learning": {"folder": "/learning", "resources": resources}}
    return validated({"model": {"target": "t"}, "draft": draft})


def test_demand_counts_trainers() -> None:
    pools = learning(num_cpus=2, num_gpus=1)
    assert demand(pools, lambda replicas: replicas.min) == {"CPU": pytest.approx(1.1 + 1 + 2 + 0.1), "GPU": 1}
    with pytest.raises(ConfigError, match=r"draft\.learning\.resources need 1 GPU \(available: 0\)"):
        check_resources(pools, {"CPU": 8.0})


def test_a_sufficient_cluster_lacks_nothing() -> None:
    check_resources(config(resources_per_rank={"num_gpus": 0.5}), {"CPU": 2.0, "GPU": 0.5})


def test_missing_resources_are_named_with_those_available() -> None:
    pools = config(tensor_parallel=2, resources_per_rank={"num_gpus": 1, "custom": {"fast_disk": 1}})
    with pytest.raises(ConfigError, match=r"2 GPU \(available: 1\), 2 fast_disk \(available: 0\)"):
        check_resources(pools, {"CPU": 8.0, "GPU": 1.0})


def test_shares_of_gpus_are_not_split_on_a_local_cluster() -> None:
    pools = config(tensor_parallel=3, resources_per_rank={"num_gpus": 0.6})
    with pytest.raises(ConfigError, match=r"3 GPU \(available: 2\)"):
        check_resources(pools, {"CPU": 8.0, "GPU": 2.0})
    check_resources(pools, {"CPU": 8.0, "GPU": 3.0})


def test_labels_need_a_real_cluster() -> None:
    with pytest.raises(ConfigError, match="labels"):
        check_resources(config(resources_per_rank={"labels": {"pool": "target"}}), {"CPU": 8.0})
    with pytest.raises(ConfigError, match="labels"):
        check_resources(learning(labels={"pool": "trainer"}), {"CPU": 8.0})
