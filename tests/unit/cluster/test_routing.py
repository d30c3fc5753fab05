"""The choice of a replica."""

from cluster.routing import Candidate, choose, turn


def test_the_least_loaded_is_chosen_and_equals_by_address():
    assert choose([Candidate("b", 1), Candidate("c", 0), Candidate("a", 0)]) == "a"
    assert choose([Candidate("a", 3), Candidate("b", 1)]) == "b"


def test_routers_that_know_nothing_of_each_other_do_not_all_begin_with_the_same_replica():
    addresses = ("a", "b", "c", "d")
    first = {choose(Candidate(a, 0, turn(f"router-{number}", a)) for a in addresses) for number in range(32)}
    assert first == set(addresses)
    assert choose([Candidate("a", 1, 0), Candidate("b", 0, 9)]) == "b", "load comes first"


def test_a_failed_replica_is_the_last_resort():
    busy = Candidate("b", 9)
    assert choose([Candidate("a", 0), busy], avoid=frozenset({"a"})) == "b"
    assert choose([Candidate("a", 0)], avoid=frozenset({"a"})) == "a"


def test_assigning_counts_at_once():
    """Many sessions placed in one go must not all go to the replica that was idle before."""
    assert Candidate("a", 1).with_one_more() == Candidate("a", 2)


def test_nobody_is_nobody():
    assert choose([]) is None
