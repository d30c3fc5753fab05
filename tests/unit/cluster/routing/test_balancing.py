"""Tests the choice of a replica."""

from cluster.routing.session_router import Candidate, Peers, choose, tie_breaker


def test_the_least_loaded_is_chosen_and_equals_by_address():
    assert choose([Candidate("b", 1), Candidate("c", 0), Candidate("a", 0)]) == "a"
    assert choose([Candidate("a", 3), Candidate("b", 1)]) == "b"


def test_independent_routers_begin_with_different_replicas():
    addresses = ("a", "b", "c", "d")
    first = {choose(Candidate(a, 0, tie_breaker(f"router-{number}", a)) for a in addresses) for number in range(32)}
    assert first == set(addresses)
    assert choose([Candidate("a", 1, 0), Candidate("b", 0, 9)]) == "b", "load comes first"


def test_a_failed_replica_is_the_last_resort():
    busy = Candidate("b", 9)
    assert choose([Candidate("a", 0), busy], avoid=frozenset({"a"})) == "b"
    assert choose([Candidate("a", 0)], avoid=frozenset({"a"})) == "a"


def test_assigning_counts_at_once():
    """Sessions placed in quick succession must not all go to the previously idle replica."""
    peers = Peers("router")
    for address in "abc":
        peers.up(address)
    chosen = []
    for _ in range(6):
        chosen.append(peers.choose(lambda _: True))
        peers.moved(None, chosen[-1])
    assert sorted(map(str, chosen[:3])) == sorted(map(str, chosen[3:])) == ["a", "b", "c"]


def test_a_reconnected_replica_keeps_its_session_count():
    peers = Peers("router")
    peers.up("a")
    peers.moved(None, "a")
    peers.down("a")
    assert not peers
    assert peers.choose(lambda _: True) is None
    peers.up("b")
    peers.up("a")
    assert peers.choose(lambda _: True) == "b"
    peers.moved("a", None)
    peers.moved(None, "b")
    assert peers.choose(lambda _: True) == "a"
    assert peers.choose(lambda address: address != "a") == "b"
    assert peers.choose(lambda _: True, avoid=frozenset({"a"})) == "b"
    assert peers.choose(lambda address: address != "b", avoid=frozenset({"a"})) == "a"


def test_no_candidate_gives_no_choice():
    assert choose([]) is None


def test_a_candidates_worth_offsets_that_many_sessions():
    peers = Peers("router")
    for address in "ab":
        peers.up(address)
    for _ in range(2):
        peers.moved(None, "a")
    assert peers.choose(lambda _: True, worth={"a": 2.5}) == "a"
    assert peers.choose(lambda _: True, worth={"a": 1.5}) == "b"
    assert peers.choose(lambda _: True, worth={"a": 3.5, "b": 2.0}) == "b"


def test_worth_does_not_make_an_unavailable_replica_eligible():
    peers = Peers("router")
    for address in "ab":
        peers.up(address)
    assert peers.choose(lambda address: address != "a", worth={"a": 9.0, "unknown": 9.0}) == "b"
    assert peers.choose(lambda _: True, avoid=frozenset({"a"}), worth={"a": 9.0}) == "b"
    peers.down("a")
    assert peers.choose(lambda _: True, worth={"a": 9.0}) == "b"
