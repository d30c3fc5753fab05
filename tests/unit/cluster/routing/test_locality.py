"""Tests the weight of a drafter's location."""

from cluster.routing.membership import Endpoint
from cluster.routing.session_router import Locality

TARGET = Endpoint("t", "T", "node1", "zone1")


def locality(*drafters: Endpoint, target: Endpoint = TARGET) -> Locality:
    near = Locality()
    near.follow([target], drafters)
    return near


def test_the_same_node_counts_more_than_the_same_zone_and_other_zones_nothing() -> None:
    near = locality(
        Endpoint("a", "A", "node1", "zone1"),
        Endpoint("b", "B", "node2", "zone1"),
        Endpoint("c", "C", "node3", "zone2"),
        Endpoint("d", "D", "node1"),
    )
    worth = near.worth("T")
    assert worth.keys() == {"A", "B", "D"}
    assert worth["A"] == worth["D"] > worth["B"] > 0


def test_unknown_locations_are_not_equal() -> None:
    near = locality(Endpoint("a", "A"), target=Endpoint("t", "T"))
    assert near.worth("T") == {}


def test_without_a_known_target_no_drafter_is_near() -> None:
    near = locality(Endpoint("a", "A", "node1", "zone1"))
    assert near.worth(None) == {}
    assert near.worth("other") == {}


def test_a_departed_drafter_is_not_local() -> None:
    near = locality(Endpoint("a", "A", "node1", "zone1"))
    near.follow([TARGET], [])
    assert near.worth("T") == {}
