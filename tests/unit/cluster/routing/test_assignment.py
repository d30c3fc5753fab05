"""Tests placement of a router's sessions, and moves off full, lost, silent or misbehaving peers."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import CapacityError, TargetLostError
from cluster.routing.ledger import CommittedTokens, Event, Failed, Generation, Session
from cluster.routing.membership import Endpoint
from cluster.routing.session_router import Assignment, Ready, SessionRouter
from protos.messages import (
    Acceptance,
    Close,
    Collapse,
    DraftAnswer,
    Finish,
    LiveSession,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Verdict,
)
from protos.prefix import Prefix
from tests.unit.cluster.samples import GREEDY, KEY

PROMPT = (1, 2, 3)
TARGET_WAIT_S = 5.0


class Desk:
    """Session router with simulated peers."""

    def __init__(self, targets: str = "T", drafters: str = "D") -> None:
        self.assignments: SessionRouter[Assignment] = SessionRouter("router", TARGET_WAIT_S)
        self.now = 0.0
        self.sent: list[tuple[str, str, Any]] = []  # session, receiver, message
        self.out: dict[str, list[Event]] = {}  # by session
        for address in targets:
            self.assignments.targets.up(address)
        for address in drafters:
            self.assignments.drafters.up(address)

    def begin(
        self, name: str = "s", draft_tokens: int = 4, prompt: tuple[int, ...] = PROMPT, salt: str = ""
    ) -> Assignment:
        coupled = Acceptance.COUPLED
        generation = Generation(name, prompt, len(prompt) + 47, (0,), GREEDY, 7, 8, 0, KEY, coupled, draft_tokens)
        assignment = Assignment(Session(replace(generation, cache_salt=salt)), self.now)
        self.note(self.assignments.add(assignment, self.now))
        return assignment

    def tick(self, now: float) -> None:
        self.note(self.assignments.tick(now))

    def cancel(self, assignment: Assignment) -> None:
        self.note(self.assignments.cancel(assignment))

    def gone(self, peer: str) -> None:
        self.note(self.assignments.gone(peer, self.now))

    def receive(self, peer: str, message: Any) -> None:
        self.note(self.assignments.receive(peer, message, self.now))

    def verdict(self, assignment: Assignment, *tokens: int, **changes: Any) -> None:
        session = assignment.session
        here = Prefix(KEY, session.generation.prompt + session.committed)
        verdict = Verdict(assignment.name, session.attempt, len(here), here.hash, tokens or (4,), 0, 0)
        source = changes.pop("source", session.target)
        self.receive(source, replace(verdict, **changes))

    def refuse(self, assignment: Assignment, source: str, reason: RefusalReason = RefusalReason.OVERLOADED) -> None:
        self.receive(source, Refusal(assignment.name, assignment.session.attempt, reason, "no"))

    def fall_silent(self, *assignments: Assignment) -> list[str]:
        """Misses a block per second until the router gives up a drafter; returns these drafters."""
        for _ in range(40):
            for assignment in assignments:
                self.verdict(assignment, answer=DraftAnswer.MISSED)
            self.tick(self.now)
            if self.assignments.given_up:
                break
            self.now += 1.0
        return list(self.assignments.given_up)

    def collapse(self, assignment: Assignment, is_resynced: bool = True) -> None:
        """Receives the target's report that the drafter's blocks became bad."""
        self.verdict(assignment, collapse=Collapse(0.8, 0.05, is_resynced))
        self.tick(self.now)

    def steps(self) -> dict[tuple[str, str], int]:
        """Returns the recovery steps taken against bad drafters."""
        return self.assignments.remedies.by_step()

    def note(self, ready: Ready[Assignment]) -> None:
        for assignment, event in ready.events:
            self.out.setdefault(assignment.name, []).append(event)
        self.sent += [(message.session, to, message) for to, message in ready.sends]

    def opened_at(self, name: str) -> list[str]:
        return [to for session, to, message in self.sent if session == name and isinstance(message, Open)]

    def errors(self, name: str) -> list[Exception]:
        return [command.error for command in self.out.get(name, []) if isinstance(command, Failed)]


def test_sessions_are_spread_over_both_pools():
    desk = Desk("TU", "DE")
    assignments = [desk.begin(name) for name in "abcd"]
    assert sorted(str(assignment.session.target) for assignment in assignments) == ["T", "T", "U", "U"]
    assert sorted(str(assignment.session.drafter) for assignment in assignments) == ["D", "D", "E", "E"]
    assert desk.opened_at("a") == [assignments[0].session.target, assignments[0].session.drafter]
    assert not desk.assignments.awaits_tick


def test_an_ended_session_frees_its_place():
    desk = Desk("TU", "")
    first = desk.begin("a")
    second = desk.begin("b")
    desk.cancel(first)
    assert desk.sent[-1] == ("a", first_target := desk.opened_at("a")[0], Close("a", 1))
    assert "a" not in desk.assignments
    assert desk.begin("c").session.target == first_target
    assert len(desk.assignments) == 2
    desk.cancel(second)
    desk.cancel(second)
    assert [assignment.name for assignment in desk.assignments] == ["c"]


def test_a_request_without_speculation_gets_no_drafter():
    desk = Desk()
    assert desk.begin(draft_tokens=0).session.drafter is None
    assert not desk.assignments.awaits_tick


def test_a_waiting_session_gets_peers_as_they_connect():
    desk = Desk("", "")
    assignment = desk.begin()
    assert desk.assignments.awaits_tick
    desk.assignments.targets.up("T")
    desk.tick(1.0)
    assert (assignment.session.target, assignment.session.drafter) == ("T", None)
    desk.assignments.drafters.up("D")
    desk.tick(2.0)
    assert assignment.session.drafter == "D"
    assert desk.opened_at("s") == ["T", "D"]


def test_a_peer_that_is_down_keeps_its_sessions_and_gets_no_new_ones():
    desk = Desk("TU", "")
    first = desk.begin("a")
    here = first.session.target
    other = "U" if first.session.target == "T" else "T"
    assert here is not None
    desk.assignments.targets.down(here)
    assert [desk.begin(name).session.target for name in "bc"] == [other, other]
    assert desk.assignments.live_at(here) == (LiveSession("a", 1),)


@pytest.mark.parametrize(("up", "error"), [("T", CapacityError), ("", TargetLostError)])
def test_a_session_without_a_target_fails_after_a_while_with_the_reason(up, error):
    desk = Desk(up, "")
    assignment = desk.begin()
    for _ in range(100):
        if assignment.session.target is not None:
            desk.refuse(assignment, "T")
        desk.now += 0.1
        desk.tick(desk.now)
        if desk.errors("s"):
            break
    (failed,) = desk.errors("s")
    assert isinstance(failed, error)
    assert TARGET_WAIT_S < desk.now < TARGET_WAIT_S + 2


def test_a_full_target_is_tried_again_after_a_pause():
    desk = Desk("T", "")
    assignment = desk.begin()
    desk.refuse(assignment, "T")
    assert assignment.session.target is None
    desk.tick(0.1)
    assert desk.opened_at("s") == ["T"]
    desk.tick(TARGET_WAIT_S)
    assert desk.opened_at("s") == ["T", "T"]


def test_a_late_refusal_marks_the_target_as_full_for_other_sessions():
    desk = Desk("TU", "")
    assignment = desk.begin()
    first = str(assignment.session.target)
    desk.refuse(assignment, first)
    desk.tick(desk.now)
    assert assignment.session.target != first
    desk.now += 60
    desk.refuse(assignment, first)
    assert desk.begin("other").session.target == assignment.session.target, "the full target has no session"


def test_targets_are_full_while_each_has_just_refused():
    desk = Desk("TU", "")
    assignment = desk.begin()
    first = str(assignment.session.target)
    desk.refuse(assignment, first)
    assert not desk.assignments.are_targets_full(desk.now), "the other has not refused"
    desk.tick(desk.now)
    desk.refuse(assignment, str(assignment.session.target))
    assert desk.assignments.are_targets_full(desk.now)
    assert not desk.assignments.are_targets_full(desk.now + 60)
    desk.assignments.targets.down("T")
    desk.assignments.targets.down("U")
    assert not desk.assignments.are_targets_full(desk.now), "without targets, one may still connect"


def test_a_request_refused_as_invalid_fails_at_once():
    desk = Desk()
    assignment = desk.begin()
    desk.refuse(assignment, "T", RefusalReason.INVALID)
    assert len(desk.errors("s")) == 1
    desk.tick(0.0)
    assert not desk.assignments.awaits_tick
    assert len(desk.opened_at("s")) == 2, "one Open for the target and one for the drafter"


def test_sessions_of_a_lost_target_move_with_their_committed_tokens():
    desk = Desk("TU", "D")
    assignments = [desk.begin(name) for name in "ab"]
    desk.verdict(assignments[0], 7)
    lost = str(assignments[0].session.target)
    other = str(assignments[1].session.target)
    desk.gone(lost)
    assert assignments[0].session.target == other
    reopened = [message for name, to, message in desk.sent if (name, to) == ("a", other)]
    assert [(message.tokens, message.attempt) for message in reopened] == [((*PROMPT, 7), 2)]
    assert desk.opened_at("a")[-1] == "D", "the drafter gets the new target address"
    desk.verdict(assignments[0], 8, source=lost, attempt=1)
    assert assignments[0].session.committed == (7,), "later verdicts of a lost target are void"


def test_a_malformed_message_moves_its_session_and_no_other():
    desk = Desk("TU", "")
    assignments = {name: desk.begin(name) for name in "abcd"}
    here = str(assignments["a"].session.target)
    other = "U" if here == "T" else "T"
    desk.note(desk.assignments.unreadable(other, "a", 1, 0.0))
    assert assignments["a"].session.target == here, "only messages of its own target count"
    desk.note(desk.assignments.unreadable(here, "a", 1, 0.0))
    assert assignments["a"].session.target == other
    desk.note(desk.assignments.unreadable(here, "unknown", 1, 0.0))
    assert sorted(str(assignment.session.target) for assignment in assignments.values()) == sorted(
        [here, other, other, other]
    )


def test_sessions_of_a_lost_drafter_move_or_continue_without_drafts():
    desk = Desk("T", "DE")
    assignments = [desk.begin(name) for name in "ab"]
    desk.gone(str(assignments[0].session.drafter))
    assert assignments[0].session.drafter == assignments[1].session.drafter
    desk.gone(str(assignments[1].session.drafter))
    assert [assignment.session.drafter for assignment in assignments] == [None, None]
    assert desk.assignments.awaits_tick
    desk.verdict(assignments[0], 7)
    assert desk.out["a"] == [CommittedTokens((7,), 0, 0)]


def test_sessions_of_a_silent_drafter_move():
    desk = Desk("T", "DE")
    assignments = [desk.begin(name) for name in "abc"]
    silent = str(assignments[0].session.drafter)
    assert desk.fall_silent(assignments[0]) == [silent]
    assert silent not in [assignment.session.drafter for assignment in assignments]
    assert desk.assignments.live_at(silent) == ()
    assert desk.begin("d").session.drafter != silent, "though it has fewer sessions than the other"


def test_a_silent_drafter_without_an_alternative_keeps_its_sessions_and_gets_no_new_ones():
    desk = Desk("T", "D")
    assignment = desk.begin("a")
    assert desk.fall_silent(assignment) == ["D"]
    assert assignment.session.drafter == "D"
    assert desk.begin("b").session.drafter is None


@pytest.mark.parametrize("changes", [{"attempt": 0}, {"source": "U"}], ids=["older attempt", "another target"])
def test_missed_blocks_of_other_attempts_and_targets_do_not_count(changes):
    """Such reports may concern another drafter."""
    desk = Desk("T", "DE")
    assignment = desk.begin()
    drafter = assignment.session.drafter
    for _ in range(40):
        desk.verdict(assignment, answer=DraftAnswer.MISSED, **changes)
        desk.tick(desk.now)
        desk.now += 1.0
    assert assignment.session.drafter == drafter


def test_a_session_refused_by_an_overloaded_drafter_gets_another():
    desk = Desk("T", "DE")
    assignment = desk.begin()
    first = str(assignment.session.drafter)
    desk.refuse(assignment, first)
    assert assignment.session.drafter is None
    desk.tick(0.0)
    assert assignment.session.drafter not in (first, None)


def test_a_drafter_that_resyncs_gets_the_ledger():
    desk = Desk()
    assignment = desk.begin()
    desk.verdict(assignment, 7)
    desk.receive("D", Resync("s", 3, 1))
    _, to, message = desk.sent[-1]
    assert (to, message.tokens) == ("D", (*PROMPT, 7))


def test_messages_about_unknown_sessions_are_ignored():
    desk = Desk()
    desk.receive("T", Verdict("x", 1, 3, 1, (4,), 0, 0))
    desk.receive("D", Resync("x", 3, 1))
    assert desk.sent == []


# ---------------------------------------------------------------- drafters with bad blocks


def test_a_resynchronized_drafter_keeps_the_session():
    """The target sends the Resync, and the router counts it."""
    desk = Desk(drafters="DE")
    assignment = desk.begin()
    drafter = str(assignment.session.drafter)
    desk.collapse(assignment, is_resynced=False)
    assert assignment.session.drafter == drafter
    assert desk.steps() == {(drafter, "resynced"): 1}
    assert not desk.assignments.awaits_tick


def test_after_a_resync_in_vain_another_drafter_takes_the_session_and_then_none(caplog):
    desk = Desk(drafters="DE")
    assignment = desk.begin()
    first = str(assignment.session.drafter)
    (second,) = {"D", "E"} - {first}
    desk.collapse(assignment)
    assert assignment.session.drafter == second
    assert desk.opened_at("s")[-1] == second
    assert ("s", first, Close("s", 1)) in desk.sent
    desk.collapse(assignment)
    assert assignment.session.drafter is None
    assert desk.sent[-1] == ("s", second, Close("s", 1))
    assert desk.steps() == {(first, "replaced"): 1, (second, "non_speculative"): 1}
    assert not desk.assignments.awaits_tick, "it continues without speculation"
    assert f"session s: drafter {first}: target accepts tokens of 5 % of its blocks, usually 80 %" in caplog.text
    assert desk.begin("next").session.drafter is not None, "the next session gets a drafter"


def test_without_another_drafter_a_session_continues_without_speculation():
    desk = Desk()
    assignment = desk.begin()
    desk.collapse(assignment)
    assert assignment.session.drafter is None
    assert desk.steps() == {("D", "non_speculative"): 1}
    desk.verdict(assignment, 4, 5)
    assert assignment.session.committed == (4, 4, 5)


def test_reports_about_earlier_attempts_and_drafters_are_ignored():
    desk = Desk(drafters="DE")
    assignment = desk.begin()
    drafter = str(assignment.session.drafter)
    desk.verdict(assignment, collapse=Collapse(0.8, 0.0, True), attempt=assignment.session.attempt + 1)
    desk.tick(0.0)
    assert assignment.session.drafter == drafter
    desk.verdict(assignment, collapse=Collapse(0.8, 0.0, True))
    desk.gone(drafter)
    moved = assignment.session.drafter
    desk.tick(0.0)
    assert assignment.session.drafter == moved != drafter
    assert desk.steps() == {}


def given_up_desk(drafters: str) -> tuple[Desk, str, Assignment]:
    """Returns a desk after repeated collapses at a drafter until the router gave it up, and a healthy drafter."""
    desk = Desk(drafters=drafters)
    assignments = [desk.begin(str(index)) for index in range(8 * len(drafters))]
    bad = str(assignments[0].session.drafter)
    last, *others = [assignment for assignment in assignments if assignment.session.drafter == bad]
    while (bad, "given up") not in desk.steps():
        desk.collapse(others.pop())
    return desk, bad, last


def test_sessions_move_off_a_drafter_whose_sessions_collapse_one_after_the_other():
    desk, bad, last = given_up_desk("DE")
    assert last.session.drafter not in (None, bad)
    assert desk.assignments.live_at(bad) == ()
    assert {desk.begin(name).session.drafter for name in "xyz"}.isdisjoint({bad})


def end(desk: Desk, assignment: Assignment) -> None:
    desk.verdict(assignment, *range(41), accepted=40, drafted=40, finish=Finish.LENGTH)


def test_a_session_that_ends_well_restores_the_drafter():
    desk, bad, last = given_up_desk("D")
    assert last.session.drafter == bad, "there is no other"
    assert desk.begin("waits").session.drafter is None
    end(desk, last)
    assert desk.begin("comes").session.drafter == bad


def test_a_collapsed_session_does_not_end_well():
    desk, _, last = given_up_desk("D")
    desk.verdict(last, collapse=Collapse(0.8, 0.0, True))
    end(desk, last)
    assert desk.begin("waits").session.drafter is None


LONG = tuple(range(100))


def test_a_conversation_stays_at_the_target_with_its_prefix_unless_that_is_far_busier():
    desk = Desk("TU", "")
    first = desk.begin("a", prompt=LONG)
    desk.verdict(first, *range(100, 140))
    home = first.session.target
    desk.cancel(first)
    turn = (*LONG, *range(100, 140), 7, 8, 9)
    assert desk.begin("b", prompt=turn).session.target == home
    assert desk.begin("c", prompt=LONG).session.target != home, "a hundred cached tokens are worth less than a session"
    assert desk.assignments.routed == {"load": 2, "prefix": 1}


def test_a_prefix_with_another_salt_is_not_cached():
    desk = Desk("T", "")
    for salt in ("mine", "yours", "mine"):
        desk.cancel(desk.begin(salt, prompt=LONG, salt=salt))
    assert desk.assignments.routed == {"load": 2, "prefix": 1}


@pytest.mark.parametrize("is_over", [True, False], ids=["ended before", "lost with it"])
def test_prefixes_of_a_lost_target_are_forgotten(is_over):
    desk = Desk("T", "")
    assignment = desk.begin("a", prompt=LONG)
    if is_over:
        desk.cancel(assignment)
    desk.gone("T")
    desk.assignments.targets.up("T")
    desk.begin("b", prompt=LONG)
    assert desk.assignments.routed == {"load": 2}


def test_a_drafter_near_the_target_is_preferred_until_it_is_far_busier():
    desk = Desk("T", "DE")
    places = [Endpoint("d", "D", "node1"), Endpoint("e", "E", "node2")]
    desk.assignments.locality.follow([Endpoint("t", "T", "node2")], places)
    given = [str(desk.begin(name).session.drafter) for name in "abcdefghij"]
    assert given[:4] == ["E", "E", "E", "E"]
    assert given.count("D") == 3, "beyond that, load decides"


def test_a_bad_drafter_is_replaced_by_the_nearest_other():
    desk = Desk("T", "DEF")
    places = [Endpoint("d", "D", "node1"), Endpoint("e", "E", "node2"), Endpoint("f", "F", "node1")]
    desk.assignments.locality.follow([Endpoint("t", "T", "node1")], places)
    assignment = desk.begin()
    left = assignment.session.drafter
    assert left in ("D", "F")
    desk.collapse(assignment)
    assert assignment.session.drafter in {"D", "F"} - {left}
