"""In a planned move, sessions leave a peer that announced its end, and neither counts as failed."""

import pytest

from cluster.routing.ledger import Phase
from protos.messages import Close, Leaving, Open, RefusalReason
from tests.unit.cluster.routing.test_assignment import TARGET_WAIT_S, RouterHarness


def other(address: str) -> str:
    return {"T": "U", "U": "T", "D": "E", "E": "D"}[address]


def leave(harness: RouterHarness, peer: str | None) -> None:
    harness.receive(str(peer), Leaving())


def test_a_session_of_a_leaving_target_moves_under_a_new_attempt():
    harness = RouterHarness("TU", "D")
    assignment = harness.begin()
    left = str(assignment.session.target)
    harness.sent.clear()
    leave(harness, left)
    assert assignment.session.target == other(left)
    assert (assignment.session.attempt, assignment.session.failures) == (2, 0)
    assert [(to, type(message), message.attempt) for _, to, message in harness.sent] == [
        (left, Close, 1),
        (other(left), Open, 2),
        ("D", Open, 2),
    ]
    assert harness.assignments.handovers == {("target", "planned"): 1}


def test_no_number_of_planned_moves_fails_a_session():
    harness = RouterHarness("TU")
    assignment = harness.begin()
    for moves in range(1, 20):
        left = str(assignment.session.target)
        leave(harness, left)
        assert assignment.session.target == other(left)
        harness.gone(left)
        harness.assignments.targets.up(left)
        assert harness.assignments.handovers["target", "planned"] == moves
    assert not harness.errors("s")


def test_a_session_stays_at_a_leaving_target_until_there_is_another():
    harness = RouterHarness("T")
    assignment = harness.begin()
    leave(harness, "T")
    harness.tick(1.0)
    assert (assignment.session.target, assignment.session.attempt) == ("T", 1)
    harness.verdict(assignment, 5)
    assert assignment.session.committed == (5,)
    harness.assignments.targets.up("U")
    harness.tick(2.0)
    assert (assignment.session.target, assignment.session.attempt) == ("U", 2)


def test_a_leaving_peer_gets_no_new_sessions():
    harness = RouterHarness("TU", "DE")
    leave(harness, "T")
    leave(harness, "D")
    harness.assignments.targets.up("T")
    harness.assignments.drafters.up("D")
    assert {(one.session.target, one.session.drafter) for one in map(harness.begin, "abcd")} == {("U", "E")}


def test_a_peer_that_reconnects_after_leaving_counts_as_new():
    harness = RouterHarness("T", "D")
    leave(harness, "T")
    harness.gone("T")
    harness.assignments.targets.up("T")
    assert harness.begin().session.target == "T"


def test_a_session_that_a_leaving_target_returns_starts_to_wait_then():
    """The session has run for longer than the queue's time limit."""
    harness = RouterHarness("T")
    assignment = harness.begin()
    leave(harness, "T")
    harness.now = 10 * TARGET_WAIT_S
    harness.refuse(assignment, "T")
    harness.tick(harness.now + TARGET_WAIT_S / 2)
    assert assignment.session.phase is Phase.SEEKING
    assert harness.assignments.handovers == {("target", "planned"): 1}
    harness.assignments.targets.up("U")
    harness.tick(harness.now + TARGET_WAIT_S)
    assert (assignment.session.target, assignment.session.failures) == ("U", 0)


def test_a_moving_session_that_finds_the_next_target_full_starts_to_wait_then():
    """The session has run for longer than the queue's time limit."""
    harness = RouterHarness("TU")
    assignment = harness.begin()
    left = str(assignment.session.target)
    harness.now = 10 * TARGET_WAIT_S
    leave(harness, left)
    harness.refuse(assignment, other(left))
    harness.tick(harness.now)
    assert assignment.session.phase is Phase.SEEKING
    harness.tick(harness.now + TARGET_WAIT_S)
    assert (assignment.session.target, harness.errors("s")) == (other(left), [])


def test_a_returned_session_fails_if_no_target_comes():
    harness = RouterHarness("T")
    assignment = harness.begin()
    leave(harness, "T")
    harness.refuse(assignment, "T")
    harness.gone("T")
    harness.tick(TARGET_WAIT_S + 1)
    assert len(harness.errors("s")) == 1


def test_a_leaving_target_that_ends_early_is_not_counted_as_lost():
    harness = RouterHarness("T")
    assignment = harness.begin()
    leave(harness, "T")
    harness.gone("T")
    assert (assignment.session.phase, assignment.session.failures) == (Phase.SEEKING, 0)
    assert harness.assignments.handovers == {("target", "planned"): 1}


def test_a_peer_that_ends_unannounced_is_lost():
    harness = RouterHarness("TU", "D")
    assignment = harness.begin()
    harness.gone(str(assignment.session.target))
    harness.gone("D")
    assert assignment.session.failures == 1
    assert harness.assignments.handovers == {("target", "lost"): 1, ("drafter", "lost"): 1}


def test_a_session_of_a_leaving_drafter_gets_another():
    harness = RouterHarness("T", "DE")
    assignment = harness.begin()
    left = str(assignment.session.drafter)
    leave(harness, left)
    assert (assignment.session.drafter, assignment.session.target) == (other(left), "T")
    assert harness.sent[-2:] == [("s", left, Close("s", 1)), harness.sent[-1]]
    assert harness.assignments.handovers == {("drafter", "planned"): 1}
    assert harness.given_up == []


def test_a_leaving_drafter_without_an_alternative_drafts_to_its_end():
    harness = RouterHarness("T", "D")
    assignment = harness.begin()
    leave(harness, "D")
    harness.tick(1.0)
    assert assignment.session.drafter == "D"
    harness.gone("D")
    assert (assignment.session.drafter, assignment.session.phase) == (None, Phase.RUNNING)
    harness.assignments.drafters.up("E")
    harness.tick(2.0)
    assert assignment.session.drafter == "E"


def test_a_leaving_target_does_not_make_targets_full():
    """New sessions go to the other target, or wait."""
    harness = RouterHarness("TU", "")
    harness.begin("a")
    leave(harness, "T")
    assert not harness.assignments.are_targets_full(0.0)


@pytest.mark.parametrize("reason", RefusalReason)
def test_a_refusal_of_a_target_that_stays_is_no_planned_move(reason):
    harness = RouterHarness("T", "")
    assignment = harness.begin()
    harness.refuse(assignment, "T", reason)
    assert not harness.assignments.handovers
