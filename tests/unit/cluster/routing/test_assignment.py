"""Tests placement of a router's sessions, and moves off full, lost, silent or misbehaving peers."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import CapacityError, TargetLostError
from cluster.routing.drafter_health import GIVEN_UP
from cluster.routing.ledger import CommittedTokens, Event, Failed, Generation, Session
from cluster.routing.membership import Endpoint
from cluster.routing.session_router import Assignment, Ready, SessionRouter
from protos.messages import (
    Acceptance,
    Close,
    Collapse,
    DraftAnswer,
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


class RouterHarness:
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
        self.note(self.assignments.receive(peer, [message], self.now))

    def verdict(self, assignment: Assignment, *tokens: int, **changes: Any) -> None:
        session = assignment.session
        here = Prefix(KEY, session.generation.prompt + session.committed)
        verdict = Verdict(assignment.name, session.attempt, len(here), here.hash, tokens or (4,), 0, 0)
        source = changes.pop("source", session.target)
        self.receive(source, replace(verdict, **changes))

    def refuse(self, assignment: Assignment, source: str, reason: RefusalReason = RefusalReason.OVERLOADED) -> None:
        self.receive(source, Refusal(assignment.name, assignment.session.attempt, reason, "no"))

    def fail(self, *assignments: Assignment, **changes: Any) -> list[str]:
        """Has no useful block per second until the router gives up a drafter; returns these drafters."""
        for _ in range(40):
            for assignment in assignments:
                self.verdict(assignment, **{"answer": DraftAnswer.MISSED, **changes})
            self.tick(self.now)
            if self.given_up:
                break
            self.now += 1.0
        return self.given_up

    @property
    def given_up(self) -> list[str]:
        """Drafters that the router has given up."""
        return [drafter for drafter, kind in self.assignments.recoveries if kind == GIVEN_UP]

    def note(self, ready: Ready[Assignment]) -> None:
        for assignment, event in ready.events:
            self.out.setdefault(assignment.name, []).append(event)
        self.sent += [(message.session, to, message) for to, message in ready.sends]

    def opened_at(self, name: str) -> list[str]:
        return [to for session, to, message in self.sent if session == name and isinstance(message, Open)]

    def errors(self, name: str) -> list[Exception]:
        return [command.error for command in self.out.get(name, []) if isinstance(command, Failed)]


def test_a_session_that_waits_for_a_full_target_precedes_a_new_one():
    harness = RouterHarness("T", "")
    waiting = harness.begin("a")
    harness.refuse(waiting, "T")
    harness.tick(0.1)
    harness.now = 1.0  # the target may have room again, and no tick has come since
    harness.begin("b")
    opened = [session for session, _, message in harness.sent if isinstance(message, Open)]
    assert opened == ["a", "a", "b"]


def test_sessions_are_spread_over_both_pools():
    harness = RouterHarness("TU", "DE")
    assignments = [harness.begin(name) for name in "abcd"]
    assert sorted(str(assignment.session.target) for assignment in assignments) == ["T", "T", "U", "U"]
    assert sorted(str(assignment.session.drafter) for assignment in assignments) == ["D", "D", "E", "E"]
    assert harness.opened_at("a") == [assignments[0].session.target, assignments[0].session.drafter]
    assert not harness.assignments.awaits_tick


def test_an_ended_session_frees_its_place():
    harness = RouterHarness("TU", "")
    first = harness.begin("a")
    second = harness.begin("b")
    harness.cancel(first)
    assert harness.sent[-1] == ("a", first_target := harness.opened_at("a")[0], Close("a", 1))
    assert "a" not in harness.assignments
    assert harness.begin("c").session.target == first_target
    assert len(harness.assignments) == 2
    harness.cancel(second)
    harness.cancel(second)
    assert [assignment.name for assignment in harness.assignments] == ["c"]


def test_a_request_without_speculation_gets_no_drafter():
    harness = RouterHarness()
    assert harness.begin(draft_tokens=0).session.drafter is None
    assert not harness.assignments.awaits_tick


def test_a_waiting_session_gets_peers_as_they_connect():
    harness = RouterHarness("", "")
    assignment = harness.begin()
    assert harness.assignments.awaits_tick
    harness.assignments.targets.up("T")
    harness.tick(1.0)
    assert (assignment.session.target, assignment.session.drafter) == ("T", None)
    harness.assignments.drafters.up("D")
    harness.tick(2.0)
    assert assignment.session.drafter == "D"
    assert harness.opened_at("s") == ["T", "D"]


def test_a_peer_that_is_down_keeps_its_sessions_and_gets_no_new_ones():
    harness = RouterHarness("TU", "")
    first = harness.begin("a")
    here = first.session.target
    other = "U" if first.session.target == "T" else "T"
    assert here is not None
    harness.assignments.targets.down(here)
    assert [harness.begin(name).session.target for name in "bc"] == [other, other]
    assert harness.assignments.live_at(here) == (LiveSession("a", 1),)


@pytest.mark.parametrize(("up", "error"), [("T", CapacityError), ("", TargetLostError)])
def test_a_session_without_a_target_fails_after_a_while_with_the_reason(up, error):
    harness = RouterHarness(up, "")
    assignment = harness.begin()
    for _ in range(100):
        if assignment.session.target is not None:
            harness.refuse(assignment, "T")
        harness.now += 0.1
        harness.tick(harness.now)
        if harness.errors("s"):
            break
    (failed,) = harness.errors("s")
    assert isinstance(failed, error)
    assert TARGET_WAIT_S < harness.now < TARGET_WAIT_S + 2


def test_a_full_target_is_tried_again_after_a_pause():
    harness = RouterHarness("T", "")
    assignment = harness.begin()
    harness.refuse(assignment, "T")
    assert assignment.session.target is None
    harness.tick(0.1)
    assert harness.opened_at("s") == ["T"]
    harness.tick(TARGET_WAIT_S)
    assert harness.opened_at("s") == ["T", "T"]


def test_a_late_refusal_marks_the_target_as_full_for_other_sessions():
    harness = RouterHarness("TU", "")
    assignment = harness.begin()
    first = str(assignment.session.target)
    harness.refuse(assignment, first)
    harness.tick(harness.now)
    assert assignment.session.target != first
    harness.now += 60
    harness.refuse(assignment, first)
    assert harness.begin("other").session.target == assignment.session.target, "the full target has no session"


def test_a_new_target_at_the_address_of_a_lost_full_one_is_not_full():
    harness = RouterHarness("T", "")
    assignment = harness.begin()
    harness.refuse(assignment, "T")
    harness.gone("T")
    harness.assignments.targets.up("T")
    harness.tick(harness.now)
    assert assignment.session.target == "T"


def test_targets_are_full_while_each_has_just_refused():
    harness = RouterHarness("TU", "")
    assignment = harness.begin()
    first = str(assignment.session.target)
    harness.refuse(assignment, first)
    assert not harness.assignments.are_targets_full(harness.now), "the other has not refused"
    harness.tick(harness.now)
    harness.refuse(assignment, str(assignment.session.target))
    assert harness.assignments.are_targets_full(harness.now)
    assert not harness.assignments.are_targets_full(harness.now + 60)
    harness.assignments.targets.down("T")
    harness.assignments.targets.down("U")
    assert not harness.assignments.are_targets_full(harness.now), "without targets, one may still connect"


def test_a_request_refused_as_invalid_fails_at_once():
    harness = RouterHarness()
    assignment = harness.begin()
    harness.refuse(assignment, "T", RefusalReason.INVALID)
    assert len(harness.errors("s")) == 1
    harness.tick(0.0)
    assert not harness.assignments.awaits_tick
    assert len(harness.opened_at("s")) == 2, "one Open for the target and one for the drafter"


def test_sessions_of_a_lost_target_move_with_their_committed_tokens():
    harness = RouterHarness("TU", "D")
    assignments = [harness.begin(name) for name in "ab"]
    harness.verdict(assignments[0], 7)
    lost = str(assignments[0].session.target)
    other = str(assignments[1].session.target)
    harness.gone(lost)
    assert assignments[0].session.target == other
    reopened = [message for name, to, message in harness.sent if (name, to) == ("a", other)]
    assert [(message.tokens, message.attempt) for message in reopened] == [((*PROMPT, 7), 2)]
    assert harness.opened_at("a")[-1] == "D", "the drafter gets the new target address"
    harness.verdict(assignments[0], 8, source=lost, attempt=1)
    assert assignments[0].session.committed == (7,), "later verdicts of a lost target are void"


def test_a_malformed_message_moves_its_session_and_no_other():
    harness = RouterHarness("TU", "")
    assignments = {name: harness.begin(name) for name in "abcd"}
    here = str(assignments["a"].session.target)
    other = "U" if here == "T" else "T"
    harness.note(harness.assignments.unreadable(other, "a", 1, 0.0))
    assert assignments["a"].session.target == here, "only messages of its own target count"
    harness.note(harness.assignments.unreadable(here, "a", 1, 0.0))
    assert assignments["a"].session.target == other
    harness.note(harness.assignments.unreadable(here, "unknown", 1, 0.0))
    assert sorted(str(assignment.session.target) for assignment in assignments.values()) == sorted(
        [here, other, other, other]
    )


def test_sessions_of_a_lost_drafter_move_or_continue_without_drafts():
    harness = RouterHarness("T", "DE")
    assignments = [harness.begin(name) for name in "ab"]
    harness.gone(str(assignments[0].session.drafter))
    assert assignments[0].session.drafter == assignments[1].session.drafter
    harness.gone(str(assignments[1].session.drafter))
    assert [assignment.session.drafter for assignment in assignments] == [None, None]
    assert harness.assignments.awaits_tick
    harness.verdict(assignments[0], 7)
    assert harness.out["a"] == [CommittedTokens((7,), 0, 0)]


def test_sessions_of_a_silent_drafter_move():
    harness = RouterHarness("T", "DE")
    assignments = [harness.begin(name) for name in "abc"]
    silent = str(assignments[0].session.drafter)
    assert harness.fail(assignments[0]) == [silent]
    assert silent not in [assignment.session.drafter for assignment in assignments]
    assert harness.assignments.live_at(silent) == ()
    assert harness.begin("d").session.drafter != silent, "though it has fewer sessions than the other"


def test_a_silent_drafter_without_an_alternative_keeps_its_sessions_and_gets_new_ones():
    harness = RouterHarness("T", "D")
    assignment = harness.begin("a")
    assert harness.fail(assignment) == ["D"]
    assert assignment.session.drafter == "D"
    assert harness.begin("b").session.drafter == "D", "its target notices when it recovers"


@pytest.mark.parametrize("changes", [{"attempt": 0}, {"source": "U"}], ids=["older attempt", "another target"])
def test_missed_blocks_of_other_attempts_and_targets_do_not_count(changes):
    """Such reports may concern another drafter."""
    harness = RouterHarness("T", "DE")
    assignment = harness.begin()
    drafter = assignment.session.drafter
    for _ in range(40):
        harness.verdict(assignment, answer=DraftAnswer.MISSED, **changes)
        harness.tick(harness.now)
        harness.now += 1.0
    assert assignment.session.drafter == drafter


def test_a_session_refused_by_an_overloaded_drafter_gets_another():
    harness = RouterHarness("T", "DE")
    assignment = harness.begin()
    first = str(assignment.session.drafter)
    harness.refuse(assignment, first)
    assert assignment.session.drafter is None
    harness.tick(0.0)
    assert assignment.session.drafter not in (first, None)


def test_a_full_drafter_that_is_no_longer_listed_is_not_taken_for_a_full_target():
    harness = RouterHarness("T", "D")
    assignment = harness.begin()
    harness.assignments.drafters.down("D")
    harness.refuse(assignment, "D")
    harness.assignments.drafters.up("D")
    harness.tick(harness.now)
    assert assignment.session.drafter is None
    harness.tick(harness.now + 1)
    assert assignment.session.drafter == "D"


def test_a_drafter_that_resyncs_gets_the_ledger():
    harness = RouterHarness()
    assignment = harness.begin()
    harness.verdict(assignment, 7)
    harness.receive("D", Resync("s", 3, 1))
    _, to, message = harness.sent[-1]
    assert (to, message.tokens) == ("D", (*PROMPT, 7))


def test_messages_about_unknown_sessions_are_ignored():
    harness = RouterHarness()
    harness.receive("T", Verdict("x", 1, 3, 1, (4,), 0, 0))
    harness.receive("D", Resync("x", 3, 1))
    assert harness.sent == []


# ---------------------------------------------------------------- drafters with bad blocks

REJECTED = {"answer": DraftAnswer.GIVEN, "drafted": 4}


def test_a_reopened_session_stays_at_its_drafter_and_is_counted(caplog):
    """The target sends the Resync."""
    harness = RouterHarness(drafters="DE")
    assignment = harness.begin()
    drafter = str(assignment.session.drafter)
    harness.verdict(assignment, collapse=Collapse(0.8))
    assert assignment.session.drafter == drafter
    assert harness.assignments.recoveries == {(drafter, "resynced"): 1}
    assert f"session s: drafter {drafter}: the target rejects every block (usually accepts 80 %)" in caplog.text


def test_reports_about_other_attempts_are_ignored():
    harness = RouterHarness(drafters="DE")
    assignment = harness.begin()
    harness.verdict(assignment, collapse=Collapse(0.8), attempt=assignment.session.attempt + 1)
    assert harness.assignments.recoveries == {}


def test_sessions_move_off_a_drafter_whose_blocks_are_all_rejected():
    harness = RouterHarness("T", "DE")
    assignments = [harness.begin(name) for name in "abc"]
    bad = str(assignments[0].session.drafter)
    assert harness.fail(assignments[0], **REJECTED) == [bad]
    assert harness.assignments.live_at(bad) == ()
    assert harness.begin("d").session.drafter != bad


@pytest.mark.parametrize(
    "changes", [{"accepted": 1}, {"drafted": 0}], ids=["an accepted token", "an answer without a block"]
)
def test_useful_answers_keep_a_drafter(changes):
    harness = RouterHarness("T", "DE")
    assignment = harness.begin()
    for _ in range(10):
        harness.verdict(assignment, 4, 5, **{**REJECTED, **changes})
        for _ in range(3):
            harness.verdict(assignment, answer=DraftAnswer.MISSED)
        harness.tick(harness.now)
        harness.now += 1.0
    assert harness.given_up == []


LONG = tuple(range(100))


def test_a_conversation_stays_at_the_target_with_its_prefix_unless_that_is_far_busier():
    harness = RouterHarness("TU", "")
    first = harness.begin("a", prompt=LONG)
    harness.verdict(first, *range(100, 140))
    home = first.session.target
    harness.cancel(first)
    turn = (*LONG, *range(100, 140), 7, 8, 9)
    assert harness.begin("b", prompt=turn).session.target == home
    assert harness.begin("c", prompt=LONG).session.target != home, (
        "a hundred cached tokens are worth less than a session"
    )
    assert harness.assignments.routed == {"load": 2, "prefix": 1}


def test_a_prefix_with_another_salt_is_not_cached():
    harness = RouterHarness("T", "")
    for salt in ("mine", "yours", "mine"):
        harness.cancel(harness.begin(salt, prompt=LONG, salt=salt))
    assert harness.assignments.routed == {"load": 2, "prefix": 1}


@pytest.mark.parametrize("is_over", [True, False], ids=["ended before", "lost with it"])
def test_prefixes_of_a_lost_target_are_forgotten(is_over):
    harness = RouterHarness("T", "")
    assignment = harness.begin("a", prompt=LONG)
    if is_over:
        harness.cancel(assignment)
    harness.gone("T")
    harness.cancel(assignment)
    harness.assignments.targets.up("T")
    harness.begin("b", prompt=LONG)
    assert harness.assignments.routed == {"load": 2}


def test_a_drafter_near_the_target_is_preferred_until_it_is_far_busier():
    harness = RouterHarness("T", "DE")
    places = [Endpoint("d", "D", "node1"), Endpoint("e", "E", "node2")]
    harness.assignments.locality.follow([Endpoint("t", "T", "node2")], places)
    given = [str(harness.begin(name).session.drafter) for name in "abcdefghij"]
    assert given[:4] == ["E", "E", "E", "E"]
    assert given.count("D") == 3, "beyond that, load decides"


def test_a_bad_drafter_is_replaced_by_the_nearest_other():
    harness = RouterHarness("T", "DEF")
    places = [Endpoint("d", "D", "node1"), Endpoint("e", "E", "node2"), Endpoint("f", "F", "node1")]
    harness.assignments.locality.follow([Endpoint("t", "T", "node1")], places)
    assignment = harness.begin()
    left = assignment.session.drafter
    assert left in ("D", "F")
    harness.fail(assignment, **REJECTED)
    assert assignment.session.drafter in {"D", "F"} - {left}
