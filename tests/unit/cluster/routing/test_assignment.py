"""All sessions of a router: who gets which peer, and where they go when peers are full, lost, silent or malformed."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.envelope import Send
from cluster.errors import CapacityError, TargetLostError
from cluster.routing.drafter_health import WELL
from cluster.routing.ledger import CommittedTokens, Event, Failed, Generation, Session
from cluster.routing.membership import Endpoint
from cluster.routing.session_router import FULL_FOR_S, Assignment, SessionRouter
from cluster.speculation.circuit_breaker import COLLAPSES, FIRST_BLOCK_S, MISSES
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
    """A router whose peers say what tests tell them to."""

    def __init__(self, targets: str = "T", drafters: str = "D") -> None:
        self.assignments: SessionRouter[Assignment] = SessionRouter("router", TARGET_WAIT_S, self._tell)
        self.now = 0.0
        self.sent: list[tuple[str, str, Any]] = []  # session, receiver, message
        self.out: dict[str, list[Event]] = {}  # by session, what whoever waits for it gets
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
        """The drafter's blocks are missed for as long as it takes; who is given up for it."""
        for _ in range(MISSES):
            for assignment in assignments:
                self.verdict(assignment, answer=DraftAnswer.MISSED)
            self.tick(self.now)
            if self.assignments.given_up:
                break
            self.now += FIRST_BLOCK_S / (MISSES - 1)
        return list(self.assignments.given_up)

    def collapse(self, assignment: Assignment, is_resynced: bool = True) -> None:
        """The target says that the drafter's blocks have become bad."""
        self.verdict(assignment, collapse=Collapse(0.8, 0.05, is_resynced))
        self.tick(self.now)

    def steps(self) -> dict[tuple[str, str], int]:
        """Returns the recovery steps taken against bad drafters."""
        return {(drafter, remedy.value): count for (drafter, remedy), count in self.assignments.remedies.counts.items()}

    def note(self, sends: list[Send]) -> None:
        self.sent += [(message.session, to, message) for to, message in sends]

    def opened_at(self, name: str) -> list[str]:
        return [to for session, to, message in self.sent if session == name and isinstance(message, Open)]

    def errors(self, name: str) -> list[Exception]:
        return [command.error for command in self.out.get(name, []) if isinstance(command, Failed)]

    def _tell(self, assignment: Assignment, event: Event) -> None:
        self.out.setdefault(assignment.name, []).append(event)


def test_sessions_are_spread_over_both_pools():
    desk = Desk("TU", "DE")
    assignments = [desk.begin(name) for name in "abcd"]
    assert sorted(str(assignment.session.target) for assignment in assignments) == ["T", "T", "U", "U"]
    assert sorted(str(assignment.session.drafter) for assignment in assignments) == ["D", "D", "E", "E"]
    assert desk.opened_at("a") == [assignments[0].session.target, assignments[0].session.drafter]
    assert not desk.assignments.awaits_tick


def test_a_session_that_is_over_makes_room():
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


def test_a_request_without_speculation_has_no_drafter_and_waits_for_none():
    desk = Desk()
    assert desk.begin(draft_tokens=0).session.drafter is None
    assert not desk.assignments.awaits_tick


def test_a_session_waits_for_peers_and_gets_them_as_they_come():
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


def test_a_leaving_peer_keeps_what_it_has_and_gets_nothing_new():
    desk = Desk("TU", "")
    first = desk.begin("a")
    here = first.session.target
    other = "U" if first.session.target == "T" else "T"
    assert here is not None
    desk.assignments.targets.down(here)
    assert [desk.begin(name).session.target for name in "bc"] == [other, other]
    assert desk.assignments.live_at(here) == (LiveSession("a", 1),)


@pytest.mark.parametrize(("up", "error"), [("T", CapacityError), ("", TargetLostError)])
def test_a_session_without_a_target_is_given_up_after_a_while_with_the_reason(up, error):
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
    assert TARGET_WAIT_S < desk.now < TARGET_WAIT_S + FULL_FOR_S


def test_a_full_target_is_left_alone_for_a_while():
    desk = Desk("T", "")
    assignment = desk.begin()
    desk.refuse(assignment, "T")
    assert assignment.session.target is None
    desk.tick(FULL_FOR_S / 2)
    assert desk.opened_at("s") == ["T"]
    desk.tick(FULL_FOR_S)
    assert desk.opened_at("s") == ["T", "T"]


def test_a_target_is_full_for_others_too_though_whom_it_refuses_has_left_it():
    desk = Desk("TU", "")
    assignment = desk.begin()
    first = str(assignment.session.target)
    desk.refuse(assignment, first)
    desk.tick(desk.now)
    assert assignment.session.target != first
    desk.now += FULL_FOR_S
    desk.refuse(assignment, first)
    assert desk.begin("other").session.target == assignment.session.target, "though the other one has no session"


def test_targets_are_full_while_each_has_just_said_so():
    desk = Desk("TU", "")
    assignment = desk.begin()
    first = str(assignment.session.target)
    desk.refuse(assignment, first)
    assert not desk.assignments.are_targets_full(desk.now), "the other one has said nothing"
    desk.tick(desk.now)
    desk.refuse(assignment, str(assignment.session.target))
    assert desk.assignments.are_targets_full(desk.now)
    assert not desk.assignments.are_targets_full(desk.now + FULL_FOR_S)
    desk.assignments.targets.down("T")
    desk.assignments.targets.down("U")
    assert not desk.assignments.are_targets_full(desk.now), "where there is none, one may still come"


def test_a_request_that_a_target_finds_fault_with_fails_and_waits_for_nobody():
    desk = Desk()
    assignment = desk.begin()
    desk.refuse(assignment, "T", RefusalReason.INVALID)
    assert len(desk.errors("s")) == 1
    desk.tick(0.0)
    assert not desk.assignments.awaits_tick
    assert len(desk.opened_at("s")) == 2, "at its target and its drafter, once"


def test_a_lost_targets_sessions_move_with_what_was_committed():
    desk = Desk("TU", "D")
    assignments = [desk.begin(name) for name in "ab"]
    desk.verdict(assignments[0], 7)
    lost = str(assignments[0].session.target)
    other = str(assignments[1].session.target)
    desk.gone(lost)
    assert assignments[0].session.target == other
    reopened = [message for name, to, message in desk.sent if (name, to) == ("a", other)]
    assert [(message.tokens, message.attempt) for message in reopened] == [((*PROMPT, 7), 2)]
    assert desk.opened_at("a")[-1] == "D", "its drafter is told where it is verified now"
    desk.verdict(assignments[0], 8, source=lost, attempt=1)
    assert assignments[0].session.committed == (7,), "what a lost target decided later is void"


def test_what_is_malformed_moves_its_session_and_no_other():
    desk = Desk("TU", "")
    assignments = {name: desk.begin(name) for name in "abcd"}
    here = str(assignments["a"].session.target)
    other = "U" if here == "T" else "T"
    desk.note(desk.assignments.unreadable(other, "a", 1, 0.0))
    assert assignments["a"].session.target == here, "only its own target can spoil it"
    desk.note(desk.assignments.unreadable(here, "a", 1, 0.0))
    assert assignments["a"].session.target == other
    desk.note(desk.assignments.unreadable(here, "unknown", 1, 0.0))
    assert sorted(str(assignment.session.target) for assignment in assignments.values()) == sorted(
        [here, other, other, other]
    )


def test_a_lost_drafters_sessions_go_to_another_or_on_without():
    desk = Desk("T", "DE")
    assignments = [desk.begin(name) for name in "ab"]
    desk.gone(str(assignments[0].session.drafter))
    assert assignments[0].session.drafter == assignments[1].session.drafter
    desk.gone(str(assignments[1].session.drafter))
    assert [assignment.session.drafter for assignment in assignments] == [None, None]
    assert desk.assignments.awaits_tick
    desk.verdict(assignments[0], 7)
    assert desk.out["a"] == [CommittedTokens((7,), 0, 0)]


def test_a_silent_drafter_is_given_up_and_named_and_its_sessions_move():
    desk = Desk("T", "DE")
    assignments = [desk.begin(name) for name in "abc"]
    silent = str(assignments[0].session.drafter)
    assert desk.fall_silent(assignments[0]) == [silent]
    assert silent not in [assignment.session.drafter for assignment in assignments]
    assert desk.assignments.live_at(silent) == ()
    assert desk.begin("d").session.drafter != silent, "though it has fewer sessions than the other"


def test_where_there_is_no_other_a_silent_drafter_keeps_its_sessions_and_gets_no_more():
    desk = Desk("T", "D")
    assignment = desk.begin("a")
    assert desk.fall_silent(assignment) == ["D"]
    assert assignment.session.drafter == "D"
    assert desk.begin("b").session.drafter is None


@pytest.mark.parametrize("changes", [{"attempt": 0}, {"source": "U"}], ids=["older attempt", "another target"])
def test_what_another_attempt_says_of_a_drafter_does_not_count(changes):
    """It may have had another drafter."""
    desk = Desk("T", "DE")
    assignment = desk.begin()
    drafter = assignment.session.drafter
    for _ in range(3 * MISSES):
        desk.verdict(assignment, answer=DraftAnswer.MISSED, **changes)
        desk.tick(desk.now)
        desk.now += 1.0
    assert assignment.session.drafter == drafter


def test_an_overloaded_drafter_is_left_for_another():
    desk = Desk("T", "DE")
    assignment = desk.begin()
    first = str(assignment.session.drafter)
    desk.refuse(assignment, first)
    assert assignment.session.drafter is None
    desk.tick(0.0)
    assert assignment.session.drafter not in (first, None)


def test_a_drafter_that_cannot_follow_gets_the_ledger_again():
    desk = Desk()
    assignment = desk.begin()
    desk.verdict(assignment, 7)
    desk.receive("D", Resync("s", 3, 1))
    _, to, message = desk.sent[-1]
    assert (to, message.tokens) == ("D", (*PROMPT, 7))


def test_words_about_unknown_sessions_change_nothing():
    desk = Desk()
    desk.receive("T", Verdict("x", 1, 3, 1, (4,), 0, 0))
    desk.receive("D", Resync("x", 3, 1))
    assert desk.sent == []


# ---------------------------------------------------------------- drafters that have become bad


def test_a_drafter_that_begins_a_session_anew_keeps_it():
    """The target has told it to; the router knows of it, and names it."""
    desk = Desk(drafters="DE")
    assignment = desk.begin()
    drafter = str(assignment.session.drafter)
    desk.collapse(assignment, is_resynced=False)
    assert assignment.session.drafter == drafter
    assert desk.steps() == {(drafter, "resynced"): 1}
    assert not desk.assignments.awaits_tick


def test_where_that_was_in_vain_another_drafter_takes_the_session_and_then_none(caplog):
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
    assert not desk.assignments.awaits_tick, "it goes on plainly to its end"
    assert f"session s: drafter {first}: target accepts tokens of 5 % of its blocks, usually 80 %" in caplog.text
    assert desk.begin("next").session.drafter is not None, "the next session tries again"


def test_where_there_is_no_other_drafter_a_session_goes_on_plainly_at_once():
    desk = Desk()
    assignment = desk.begin()
    desk.collapse(assignment)
    assert assignment.session.drafter is None
    assert desk.steps() == {("D", "non_speculative"): 1}
    desk.verdict(assignment, 4, 5)
    assert assignment.session.committed == (4, 4, 5)


def test_what_is_said_of_an_attempt_or_a_drafter_that_is_over_changes_nothing():
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
    """Sessions of one drafter have collapsed one after the other; one of its sessions has not."""
    desk = Desk(drafters=drafters)
    assignments = [desk.begin(str(index)) for index in range(len(drafters) * (COLLAPSES + 1))]
    bad = str(assignments[0].session.drafter)
    *collapsing, last = [assignment for assignment in assignments if assignment.session.drafter == bad]
    for assignment in collapsing:
        desk.collapse(assignment)
    assert desk.steps()[bad, "given up"] == 1
    return desk, bad, last


def test_a_drafter_whose_sessions_collapse_one_after_the_other_is_given_up_and_its_sessions_move():
    desk, bad, last = given_up_desk("DE")
    assert last.session.drafter not in (None, bad)
    assert desk.assignments.live_at(bad) == ()
    assert {desk.begin(name).session.drafter for name in "xyz"}.isdisjoint({bad})


def end(desk: Desk, assignment: Assignment) -> None:
    desk.verdict(assignment, *range(WELL + 1), accepted=WELL, drafted=WELL, finish=Finish.LENGTH)


def test_a_session_that_ends_well_brings_the_drafter_back():
    desk, bad, last = given_up_desk("D")
    assert last.session.drafter == bad, "there is no other"
    assert desk.begin("waits").session.drafter is None
    end(desk, last)
    assert desk.begin("comes").session.drafter == bad


def test_a_session_that_collapsed_did_not_end_well():
    desk, _, last = given_up_desk("D")
    desk.verdict(last, collapse=Collapse(0.8, 0.0, True))
    end(desk, last)
    assert desk.begin("waits").session.drafter is None


LONG = tuple(range(100))


def test_a_conversation_goes_on_where_its_beginning_is_unless_that_is_far_ahead():
    desk = Desk("TU", "")
    first = desk.begin("a", prompt=LONG)
    desk.verdict(first, *range(100, 140))
    home = first.session.target
    desk.cancel(first)
    turn = (*LONG, *range(100, 140), 7, 8, 9)
    assert desk.begin("b", prompt=turn).session.target == home
    assert desk.begin("c", prompt=LONG).session.target != home, "a hundred tokens are worth less than a session"
    assert desk.assignments.routed == {"load": 2, "prefix": 1}


def test_the_same_beginning_of_another_salt_is_not_there_already():
    desk = Desk("T", "")
    for salt in ("mine", "yours", "mine"):
        desk.cancel(desk.begin(salt, prompt=LONG, salt=salt))
    assert desk.assignments.routed == {"load": 2, "prefix": 1}


def test_a_target_that_is_gone_is_remembered_for_nothing():
    desk = Desk("T", "")
    desk.cancel(desk.begin("a", prompt=LONG))
    desk.gone("T")
    desk.assignments.targets.up("T")
    desk.begin("b", prompt=LONG)
    assert desk.assignments.routed == {"load": 2}


def test_a_session_that_is_lost_with_its_target_leaves_no_memory_of_it():
    desk = Desk("T", "")
    desk.begin("a", prompt=LONG)
    desk.gone("T")
    desk.assignments.targets.up("T")
    desk.begin("b", prompt=LONG)
    assert desk.assignments.routed == {"load": 2}


def test_a_drafter_near_the_target_is_taken_until_it_is_far_ahead():
    desk = Desk("T", "DE")
    places = [Endpoint("d", "D", "node1"), Endpoint("e", "E", "node2")]
    desk.assignments.locality.follow([Endpoint("t", "T", "node2")], places)
    given = [str(desk.begin(name).session.drafter) for name in "abcdefghij"]
    assert given[:4] == ["E", "E", "E", "E"]
    assert given.count("D") == 3, "the rest follow the load, at the same distance"


def test_where_a_bad_drafter_is_replaced_the_nearest_other_is_taken():
    desk = Desk("T", "DEF")
    places = [Endpoint("d", "D", "node1"), Endpoint("e", "E", "node2"), Endpoint("f", "F", "node1")]
    desk.assignments.locality.follow([Endpoint("t", "T", "node1")], places)
    assignment = desk.begin()
    left = assignment.session.drafter
    assert left in ("D", "F")
    desk.collapse(assignment)
    assert assignment.session.drafter in {"D", "F"} - {left}
