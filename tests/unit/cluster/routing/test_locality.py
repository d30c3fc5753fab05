"""Weight of a drafter's location."""

from cluster.routing.membership import Endpoint
from cluster.routing.session_router import SAME_NODE, SAME_ZONE, Locality

TARGET = Endpoint("t", "T", "node1", "zone1")


def nearness(*drafters: Endpoint, target: Endpoint = TARGET) -> Locality:
    near = Locality()
    near.follow([target], drafters)
    return near


def test_the_same_node_counts_more_than_the_same_zone_and_elsewhere_nothing() -> None:
    near = nearness(
        Endpoint("a", "A", "node1", "zone1"),
        Endpoint("b", "B", "node2", "zone1"),
        Endpoint("c", "C", "node3", "zone2"),
        Endpoint("d", "D", "node1"),
    )
    assert near.worth("T") == {"A": SAME_NODE, "B": SAME_ZONE, "D": SAME_NODE}


def test_places_that_nobody_knows_are_not_the_same_place() -> None:
    near = nearness(Endpoint("a", "A"), target=Endpoint("t", "T"))
    assert near.worth("T") == {}


def test_a_session_without_a_target_and_one_on_an_unknown_target_are_near_to_nobody() -> None:
    near = nearness(Endpoint("a", "A", "node1", "zone1"))
    assert near.worth(None) == {}
    assert near.worth("other") == {}


def test_who_has_left_is_near_to_nobody() -> None:
    near = nearness(Endpoint("a", "A", "node1", "zone1"))
    near.follow([TARGET], [])
    assert near.worth("T") == {}
