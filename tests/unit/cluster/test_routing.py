"""The choice of a replica."""

from cluster.routing import Candidate, choose


def test_the_least_loaded_is_chosen_and_equals_by_address():
    assert choose([Candidate("b", 1), Candidate("c", 0), Candidate("a", 0)]) == "a"
    assert choose([Candidate("a", 3), Candidate("b", 1)]) == "b"


def test_a_full_or_failed_replica_is_the_last_resort():
    idle_but_full, busy = Candidate("a", 0, refused=True), Candidate("b", 9)
    assert choose([idle_but_full, busy]) == "b"
    assert choose([Candidate("a", 0), busy], avoid=frozenset({"a"})) == "b"
    assert choose([Candidate("a", 0), Candidate("b", 9, refused=True)], avoid=frozenset({"a"})) == "b"
    assert choose([Candidate("a", 0)], avoid=frozenset({"a"})) == "a"


def test_nobody_is_nobody():
    assert choose([]) is None
