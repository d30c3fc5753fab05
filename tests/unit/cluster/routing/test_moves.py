"""Peers that leave as planned: their sessions go elsewhere, however often, and nobody is blamed."""

import pytest

from cluster.routing.ledger import MAX_REOPENS, Phase
from protos.messages import Close, Leaving, Open, RefusalReason
from tests.unit.cluster.routing.test_assignment import TARGET_WAIT_S, Desk


def other(address: str) -> str:
    return {"T": "U", "U": "T", "D": "E", "E": "D"}[address]


def leave(desk: Desk, peer: str | None) -> None:
    desk.receive(str(peer), Leaving())


def test_a_session_of_a_target_that_leaves_goes_to_another_under_a_new_attempt():
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


def test_planned_moves_fail_no_session_however_many_there_are():
    desk = Desk("TU")
    assignment = desk.begin()
    for moves in range(1, MAX_REOPENS + 3):
        left = str(assignment.session.target)
        leave(desk, left)
        assert assignment.session.target == other(left)
        desk.gone(left)
        desk.assignments.targets.up(left)
        assert desk.assignments.handovers["target", "planned"] == moves
    assert not desk.errors("s")


def test_it_stays_where_it_is_until_there_is_another():
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


def test_nothing_new_goes_to_who_leaves():
    desk = Desk("TU", "DE")
    leave(desk, "T")
    leave(desk, "D")
    desk.assignments.targets.up("T")
    desk.assignments.drafters.up("D")
    assert {(one.session.target, one.session.drafter) for one in map(desk.begin, "abcd")} == {("U", "E")}


def test_whoever_comes_back_at_its_address_is_another():
    desk = Desk("T", "D")
    leave(desk, "T")
    desk.gone("T")
    desk.assignments.targets.up("T")
    assert desk.begin().session.target == "T"


def test_what_is_given_back_in_the_end_waits_for_a_target_from_then_on():
    """It has run for longer than a session may wait, which is no reason to fail it."""
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


def test_nor_does_it_wait_for_ever():
    desk = Desk("T")
    assignment = desk.begin()
    leave(desk, "T")
    desk.refuse(assignment, "T")
    desk.gone("T")
    desk.tick(TARGET_WAIT_S + 1)
    assert len(desk.errors("s")) == 1


def test_one_that_leaves_and_ends_before_its_sessions_are_moved_is_not_lost():
    desk = Desk("T")
    assignment = desk.begin()
    leave(desk, "T")
    desk.gone("T")
    assert (assignment.session.phase, assignment.session.failures) == (Phase.SEEKING, 0)
    assert desk.assignments.handovers == {("target", "planned"): 1}


def test_one_that_says_nothing_is_lost():
    desk = Desk("TU", "D")
    assignment = desk.begin()
    desk.gone(str(assignment.session.target))
    desk.gone("D")
    assert assignment.session.failures == 1
    assert desk.assignments.handovers == {("target", "lost"): 1, ("drafter", "lost"): 1}


def test_a_session_of_a_drafter_that_leaves_gets_another():
    desk = Desk("T", "DE")
    assignment = desk.begin()
    left = str(assignment.session.drafter)
    leave(desk, left)
    assert (assignment.session.drafter, assignment.session.target) == (other(left), "T")
    assert desk.sent[-2:] == [("s", left, Close("s", 1)), desk.sent[-1]]
    assert desk.assignments.handovers == {("drafter", "planned"): 1}
    assert not desk.assignments.given_up


def test_where_there_is_no_other_drafter_it_drafts_to_its_end():
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


def test_a_target_that_leaves_is_no_reason_to_send_requests_away():
    """Its sessions have been moved; those that come go to the other, or wait."""
    desk = Desk("TU", "")
    desk.begin("a")
    leave(desk, "T")
    assert not desk.assignments.are_targets_full(0.0)


@pytest.mark.parametrize("reason", RefusalReason)
def test_a_refusal_of_one_that_stays_is_no_move(reason):
    desk = Desk("T", "")
    assignment = desk.begin()
    desk.refuse(assignment, "T", reason)
    assert not desk.assignments.handovers
