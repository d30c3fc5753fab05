"""In a planned move, sessions leave a peer that announced its end, and neither counts as failed."""

import pytest

from cluster.routing.ledger import Phase
from protos.messages import Close, Leaving, Open, RefusalReason
from tests.unit.cluster.routing.test_assignment import TARGET_WAIT_S, Desk


def other(address: str) -> str:
    return {"T": "U", "U": "T", "D": "E", "E": "D"}[address]


def leave(desk: Desk, peer: str | None) -> None:
    desk.receive(str(peer), Leaving())


def test_a_session_of_a_leaving_target_moves_under_a_new_attempt():
    desk = Desk("TU", "D")
    assignment = desk.begin()
    left = str(assignment.session.target)
    desk.sent.clear()
    leave(desk, left)
    assert assignment.session.target == other(left)
    assert (assignment.session.attempt, assignment.session.failures) == (2, 0)
    assert [(to, type(message), message.attempt) for _, to, message in desk.sent] == [
        (left, Close, 1),
        (other(left), Open, 2),
        ("D", Open, 2),
    ]
    assert desk.assignments.handovers == {("target", "planned"): 1}


def test_no_number_of_planned_moves_fails_a_session():
    desk = Desk("TU")
    assignment = desk.begin()
    for moves in range(1, 20):
        left = str(assignment.session.target)
        leave(desk, left)
        assert assignment.session.target == other(left)
        desk.gone(left)
        desk.assignments.targets.up(left)
        assert desk.assignments.handovers["target", "planned"] == moves
    assert not desk.errors("s")


def test_a_session_stays_at_a_leaving_target_until_there_is_another():
    desk = Desk("T")
    assignment = desk.begin()
    leave(desk, "T")
    desk.tick(1.0)
    assert (assignment.session.target, assignment.session.attempt) == ("T", 1)
    desk.verdict(assignment, 5)
    assert assignment.session.committed == (5,)
    desk.assignments.targets.up("U")
    desk.tick(2.0)
    assert (assignment.session.target, assignment.session.attempt) == ("U", 2)


def test_a_leaving_peer_gets_no_new_sessions():
    desk = Desk("TU", "DE")
    leave(desk, "T")
    leave(desk, "D")
    desk.assignments.targets.up("T")
    desk.assignments.drafters.up("D")
    assert {(one.session.target, one.session.drafter) for one in map(desk.begin, "abcd")} == {("U", "E")}


def test_a_peer_that_reconnects_after_leaving_counts_as_new():
    desk = Desk("T", "D")
    leave(desk, "T")
    desk.gone("T")
    desk.assignments.targets.up("T")
    assert desk.begin().session.target == "T"


def test_a_session_that_a_leaving_target_returns_starts_to_wait_then():
    """The session has run for longer than the queue's time limit."""
    desk = Desk("T")
    assignment = desk.begin()
    leave(desk, "T")
    desk.now = 10 * TARGET_WAIT_S
    desk.refuse(assignment, "T")
    desk.tick(desk.now + TARGET_WAIT_S / 2)
    assert assignment.session.phase is Phase.SEEKING
    assert desk.assignments.handovers == {("target", "planned"): 1}
    desk.assignments.targets.up("U")
    desk.tick(desk.now + TARGET_WAIT_S)
    assert (assignment.session.target, assignment.session.failures) == ("U", 0)


def test_a_returned_session_fails_if_no_target_comes():
    desk = Desk("T")
    assignment = desk.begin()
    leave(desk, "T")
    desk.refuse(assignment, "T")
    desk.gone("T")
    desk.tick(TARGET_WAIT_S + 1)
    assert len(desk.errors("s")) == 1


def test_a_leaving_target_that_ends_early_is_not_counted_as_lost():
    desk = Desk("T")
    assignment = desk.begin()
    leave(desk, "T")
    desk.gone("T")
    assert (assignment.session.phase, assignment.session.failures) == (Phase.SEEKING, 0)
    assert desk.assignments.handovers == {("target", "planned"): 1}


def test_a_peer_that_ends_unannounced_is_lost():
    desk = Desk("TU", "D")
    assignment = desk.begin()
    desk.gone(str(assignment.session.target))
    desk.gone("D")
    assert assignment.session.failures == 1
    assert desk.assignments.handovers == {("target", "lost"): 1, ("drafter", "lost"): 1}


def test_a_session_of_a_leaving_drafter_gets_another():
    desk = Desk("T", "DE")
    assignment = desk.begin()
    left = str(assignment.session.drafter)
    leave(desk, left)
    assert (assignment.session.drafter, assignment.session.target) == (other(left), "T")
    assert desk.sent[-2:] == [("s", left, Close("s", 1)), desk.sent[-1]]
    assert desk.assignments.handovers == {("drafter", "planned"): 1}
    assert not desk.assignments.given_up


def test_a_leaving_drafter_without_an_alternative_drafts_to_its_end():
    desk = Desk("T", "D")
    assignment = desk.begin()
    leave(desk, "D")
    desk.tick(1.0)
    assert assignment.session.drafter == "D"
    desk.gone("D")
    assert (assignment.session.drafter, assignment.session.phase) == (None, Phase.RUNNING)
    desk.assignments.drafters.up("E")
    desk.tick(2.0)
    assert assignment.session.drafter == "E"


def test_a_leaving_target_does_not_make_targets_full():
    """New sessions go to the other target, or wait."""
    desk = Desk("TU", "")
    desk.begin("a")
    leave(desk, "T")
    assert not desk.assignments.are_targets_full(0.0)


@pytest.mark.parametrize("reason", RefusalReason)
def test_a_refusal_of_a_target_that_stays_is_no_planned_move(reason):
    desk = Desk("T", "")
    assignment = desk.begin()
    desk.refuse(assignment, "T", reason)
    assert not desk.assignments.handovers
