"""Tests the nodes that can hold a pool, and the messages if none can."""

from typing import Any

import pytest

from cluster.config import SlipstreamConfig, validated
from serve_app.operations.checks import Node, copies_that_fit, matches_selector, needs, unmet_needs

GPUS = {"CPU": 8.0, "GPU": 4.0}


def config(**sections: Any) -> SlipstreamConfig:
    return validated({"model": {"target": "t"}, "draft": {"method": "ngram"}} | sections)


def node(name: str, resources: dict[str, float], **labels: str) -> Node:
    return Node(name, f"10.0.0.{name}", resources, labels)


def on_gpus(draft: dict[str, Any] | None = None, **target: Any) -> SlipstreamConfig:
    asked = {"tensor_parallel": 4, "resources_per_rank": {"num_gpus": 1, "labels": {"pool": "target"}}} | target
    return config(target=asked, draft={"method": "ngram"} | (draft or {}))


def test_a_sufficient_cluster_has_no_misfit() -> None:
    nodes = [node("1", {"CPU": 2.0}), node("2", GPUS, pool="target")]
    assert unmet_needs(on_gpus(), nodes) == []


def test_an_unknown_label_is_named_with_the_existing_ones() -> None:
    (line,) = unmet_needs(on_gpus(), [node("1", GPUS, pool="draft"), node("2", GPUS)])
    assert line.startswith("target.resources_per_rank.labels: a target replica needs a node with pool=target")
    assert "none of 2 nodes has them; existing labels: pool=draft;" in line


def test_a_replica_too_large_for_any_node() -> None:
    """Four GPUs on two nodes cannot serve a replica that needs four on one node."""
    halves = {"CPU": 8.0, "GPU": 2.0}
    (line,) = unmet_needs(on_gpus(), [node("1", halves, pool="target"), node("2", halves, pool="target")])
    assert "needs 4.1 CPU, 4 GPU on one node with pool=target, but no node has more than 2 GPU" in line


def test_a_replica_whose_resources_are_split_between_nodes() -> None:
    nodes = [node("1", {"CPU": 1.0, "GPU": 8.0}, pool="target"), node("2", {"CPU": 64.0}, pool="target")]
    (line,) = unmet_needs(on_gpus(), nodes)
    assert "no node has all of them" in line


def test_a_pool_with_room_for_too_few_replicas() -> None:
    (line,) = unmet_needs(
        on_gpus(replicas={"min": 3, "max": 3}), [node("1", GPUS | {"CPU": 90.0, "GPU": 8}, pool="target")]
    )
    assert "3 times a target replica must always run, but 1 node has room for 2" in line


def test_pools_that_fit_individually_but_not_in_total() -> None:
    crowded = config(draft={"method": "ngram", "resources": {"num_cpus": 2}})
    (line,) = unmet_needs(crowded, [node("1", {"CPU": 3.0})])
    assert line == (
        "the pools at their minimum size need 3.2 CPU together, but 1 node has 3 CPU; add nodes or reserve less"
    )


def test_pools_of_the_same_labels_that_fit_individually_but_not_in_total() -> None:
    target = {"resources_per_rank": {"num_cpus": 1, "labels": {"pool": "target"}}}
    entry = {"model": {"target": "t"}, "target": target}
    two = validated({"models": {"a": entry, "b": entry}, "draft": {"method": "ngram"}})
    others = node("1", {"CPU": 8.0})
    (line,) = unmet_needs(two, [others, node("2", {"CPU": 2.0}, pool="target")])
    assert line.startswith("the pools on nodes with pool=target at their minimum size need 2.2 CPU together")
    assert unmet_needs(two, [others, node("2", {"CPU": 2.2}, pool="target")]) == []


def test_an_empty_draft_pool_must_have_room_for_its_first_drafter() -> None:
    draft = {"replicas": {"min": 0, "max": 2}, "resources": {"num_gpus": 1}}
    (line,) = unmet_needs(on_gpus(draft, resources_per_rank={}), [node("1", {"CPU": 8.0})])
    assert line.startswith("draft.resources: a drafter needs")


def test_a_trainer_needs_its_resources_beside_the_pools() -> None:
    learning = {"folder": "/learning", "resources": {"num_cpus": 4}}
    pools = config(draft={"model": "d", "learning": learning})
    (line,) = unmet_needs(pools, [node("1", {"CPU": 3.0})])
    assert line.startswith("draft.learning.resources: a trainer needs 4 CPU on one node")
    (line,) = unmet_needs(pools, [node("1", {"CPU": 5.0})])
    assert line.startswith("the pools at their minimum size need 6.2 CPU together")
    assert unmet_needs(pools, [node("1", {"CPU": 6.2})]) == []


def test_default_routers_are_counted() -> None:
    """A cluster of 16 CPUs starts two routers."""
    draft = {"method": "ngram", "resources": {"num_cpus": 0.75}}
    pools = {"target": {"resources_per_rank": {"num_cpus": 15}}, "draft": draft}
    (line,) = unmet_needs(config(**pools), [node("1", {"CPU": 16.0})])
    assert line.startswith("the pools at their minimum size need 16.05 CPU together")
    assert unmet_needs(config(**pools, server={"routers": 1}), [node("1", {"CPU": 16.0})]) == []


def sharing_gpus(count: int, share: float, tensor_parallel: int = 1, target: float = 0.0) -> SlipstreamConfig:
    replicas = {"min": count, "max": count}
    return config(
        draft={"model": "d", "replicas": replicas, "resources": {"num_cpus": 0, "num_gpus": share}},
        target={"tensor_parallel": tensor_parallel, "resources_per_rank": {"num_gpus": target}},
    )


@pytest.mark.parametrize(("count", "share", "slots"), [(3, 0.6, 2), (5, 0.4, 4), (9, 0.25, 8)])
def test_no_drafter_spans_two_gpus(count: int, share: float, slots: int) -> None:
    two = [node("1", {"CPU": 16.0, "GPU": 2.0})]
    (line,) = unmet_needs(sharing_gpus(count, share), two)
    assert f"room for {slots}" in line
    assert unmet_needs(sharing_gpus(slots, share), two) == []


def test_no_rank_spans_two_gpus() -> None:
    wide = sharing_gpus(1, 0.0, tensor_parallel=3, target=0.6)
    (line,) = unmet_needs(wide, [node("1", {"CPU": 16.0, "GPU": 2.0})])
    assert "3.1 CPU, 3 GPU on one node, but no node has more than 2 GPU" in line
    assert unmet_needs(wide, [node("1", {"CPU": 16.0, "GPU": 3.0})]) == []


def test_pools_share_gpus_only_as_far_as_their_shares_fit() -> None:
    """Two ranks of 0.8 leave 0.2 of each GPU; ranks of 0.6 leave room for drafters of 0.4."""
    two = [node("1", {"CPU": 16.0, "GPU": 2.0})]
    (line,) = unmet_needs(sharing_gpus(1, 0.4, tensor_parallel=2, target=0.8), two)
    assert line.endswith("at their minimum size need 2.5 GPU together, but 1 node has 2 GPU; add nodes or reserve less")
    assert unmet_needs(sharing_gpus(2, 0.4, tensor_parallel=2, target=0.6), two) == []


@pytest.mark.parametrize(("gpus", "fits"), [(0.25, 4), (0.3, 3), (1.0, 1)])
def test_fractions_of_a_gpu_are_counted_without_rounding_errors(gpus: float, fits: int) -> None:
    assert copies_that_fit({"GPU": 1.0}, {"GPU": gpus}) == fits
    assert copies_that_fit({"CPU": 0.3}, {"CPU": 0.1}) == 3


def test_a_target_needs_all_ranks_and_its_coordinator() -> None:
    target, drafter, router = needs(on_gpus())
    assert target.resources == {"CPU": pytest.approx(4.1), "GPU": 4}
    assert (drafter.resources, router.resources) == ({"CPU": 1}, {"CPU": 0.1})


@pytest.mark.parametrize(
    ("wanted", "does"),
    [("a", True), ("b", False), ("!b", True), ("!a", False), ("in(b, a)", True), ("!in(b,a)", False)],
)
def test_label_selectors_follow_ray(wanted: str, does: bool) -> None:
    assert matches_selector({"zone": "a"}, {"zone": wanted}) is does
    assert matches_selector({}, {"zone": wanted}) is wanted.startswith("!")
