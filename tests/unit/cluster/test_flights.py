"""All sessions of a router: who gets which peer, and where they go when peers are full, lost, silent or malformed."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.breaker import FIRST_BLOCK_S, TRIP_MISSES
from cluster.errors import CapacityError, TargetLostError
from cluster.flights import FULL_FOR_S, Flight, Flights
from cluster.session import Command, Emit, Failed, Generation, Session, ToDrafter, ToTarget
from protos.messages import (
    Acceptance,
    Close,
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


class Desk:
    """A router whose peers say what tests tell them to."""

    def __init__(self, targets: str = "T", drafters: str = "D") -> None:
        self.flights: Flights[Flight] = Flights("router", TARGET_WAIT_S, self._do)
        self.now = 0.0
        self.sent: list[tuple[str, str, Any]] = []  # session, receiver, message
        self.out: dict[str, list[Command]] = {}  # by session, what whoever waits for it gets
        for address in targets:
            self.flights.targets.up(address)
        for address in drafters:
            self.flights.drafters.up(address)

    def begin(self, name: str = "s", max_draft_tokens: int = 4) -> Flight:
        coupled = Acceptance.COUPLED
        generation = Generation(name, PROMPT, 50, (0,), GREEDY, 7, 8, 0, KEY, coupled, max_draft_tokens)
        flight = Flight(Session(generation), self.now)
        self.flights.add(flight, self.now)
        return flight

    def verdict(self, flight: Flight, *tokens: int, **changes: Any) -> str | None:
        session = flight.session
        here = Prefix(KEY, PROMPT + session.committed)
        verdict = Verdict(flight.name, session.attempt, len(here), here.hash, tokens or (4,), 0, 0)
        source = changes.pop("source", session.target)
        return self.flights.target_says(source, replace(verdict, **changes), self.now)

    def refuse(self, flight: Flight, source: str, reason: RefusalReason = RefusalReason.OVERLOADED) -> None:
        refusal = Refusal(flight.name, flight.session.attempt, reason, "no")
        says = self.flights.target_says if source.startswith("T") else self.flights.drafter_says
        says(source, refusal, self.now)

    def fall_silent(self, *flights: Flight) -> str | None:
        """The drafter's blocks are missed for as long as it takes; who is given up for it."""
        for _ in range(TRIP_MISSES):
            for flight in flights:
                if (silent := self.verdict(flight, answer=DraftAnswer.MISSED)) is not None:
                    return silent
            self.now += FIRST_BLOCK_S / (TRIP_MISSES - 1)
        return None

    def opened_at(self, name: str) -> list[str]:
        return [to for session, to, message in self.sent if session == name and isinstance(message, Open)]

    def errors(self, name: str) -> list[Exception]:
        return [command.error for command in self.out.get(name, []) if isinstance(command, Failed)]

    def _do(self, flight: Flight, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, ToTarget | ToDrafter):
                self.sent.append((flight.name, command.address, command.message))
            else:
                self.out.setdefault(flight.name, []).append(command)


def test_sessions_are_spread_over_both_pools():
    desk = Desk("TU", "DE")
    flights = [desk.begin(name) for name in "abcd"]
    assert sorted(str(flight.target) for flight in flights) == ["T", "T", "U", "U"]
    assert sorted(str(flight.drafter) for flight in flights) == ["D", "D", "E", "E"]
    assert desk.opened_at("a") == [flights[0].target, flights[0].drafter]
    assert not desk.flights.has_waiting


def test_a_session_that_is_over_makes_room():
    desk = Desk("TU", "")
    first, second = desk.begin("a"), desk.begin("b")
    desk.flights.cancel(first)
    assert desk.sent[-1] == ("a", first_target := desk.opened_at("a")[0], Close("a", 1))
    assert "a" not in desk.flights
    assert desk.begin("c").target == first_target
    assert len(desk.flights) == 2
    desk.flights.cancel(second)
    desk.flights.cancel(second)
    assert [flight.name for flight in desk.flights] == ["c"]


def test_a_request_without_speculation_has_no_drafter_and_waits_for_none():
    desk = Desk()
    assert desk.begin(max_draft_tokens=0).drafter is None
    assert not desk.flights.has_waiting


def test_a_session_waits_for_peers_and_gets_them_as_they_come():
    desk = Desk("", "")
    flight = desk.begin()
    assert desk.flights.has_waiting
    desk.flights.targets.up("T")
    desk.flights.tick(1.0)
    assert (flight.target, flight.drafter) == ("T", None)
    desk.flights.drafters.up("D")
    desk.flights.tick(2.0)
    assert flight.drafter == "D"
    assert desk.opened_at("s") == ["T", "D"]


def test_a_leaving_peer_keeps_what_it_has_and_gets_nothing_new():
    desk = Desk("TU", "")
    first = desk.begin("a")
    here, other = first.target, "U" if first.target == "T" else "T"
    assert here is not None
    desk.flights.targets.down(here)
    assert [desk.begin(name).target for name in "bc"] == [other, other]
    assert desk.flights.live_at_target(here) == (LiveSession("a", 1),)


@pytest.mark.parametrize(("up", "error"), [("T", CapacityError), ("", TargetLostError)])
def test_a_session_without_a_target_is_given_up_after_a_while_with_the_reason(up, error):
    desk = Desk(up, "")
    flight = desk.begin()
    for _ in range(100):
        if flight.target is not None:
            desk.refuse(flight, "T")
        desk.now += 0.1
        desk.flights.tick(desk.now)
        if desk.errors("s"):
            break
    (failed,) = desk.errors("s")
    assert isinstance(failed, error)
    assert TARGET_WAIT_S < desk.now < TARGET_WAIT_S + FULL_FOR_S


def test_a_full_target_is_left_alone_for_a_while():
    desk = Desk("T", "")
    flight = desk.begin()
    desk.refuse(flight, "T")
    assert flight.target is None
    desk.flights.tick(FULL_FOR_S / 2)
    assert desk.opened_at("s") == ["T"]
    desk.flights.tick(FULL_FOR_S)
    assert desk.opened_at("s") == ["T", "T"]


def test_a_request_that_a_target_finds_fault_with_fails_and_waits_for_nobody():
    desk = Desk()
    flight = desk.begin()
    desk.refuse(flight, "T", RefusalReason.INVALID)
    assert len(desk.errors("s")) == 1
    desk.flights.tick(0.0)
    assert not desk.flights.has_waiting
    assert len(desk.opened_at("s")) == 2, "at its target and its drafter, once"


def test_a_lost_targets_sessions_move_with_what_was_committed():
    desk = Desk("TU", "D")
    flights = [desk.begin(name) for name in "ab"]
    desk.verdict(flights[0], 7)
    lost, other = str(flights[0].target), str(flights[1].target)
    assert desk.flights.target_lost(lost, 0.0) == 1
    assert flights[0].target == other
    reopened = [message for name, to, message in desk.sent if (name, to) == ("a", other)]
    assert [(message.tokens, message.attempt) for message in reopened] == [((*PROMPT, 7), 2)]
    assert desk.opened_at("a")[-1] == "D", "its drafter is told where it is verified now"
    desk.verdict(flights[0], 8, source=lost, attempt=1)
    assert flights[0].session.committed == (7,), "what a lost target decided later is void"


def test_what_is_malformed_moves_its_session_and_no_other():
    desk = Desk("TU", "")
    flights = {name: desk.begin(name) for name in "abcd"}
    here = str(flights["a"].target)
    other = "U" if here == "T" else "T"
    desk.flights.target_unreadable(other, "a", 1, 0.0)
    assert flights["a"].target == here, "only its own target can spoil it"
    desk.flights.target_unreadable(here, "a", 1, 0.0)
    assert flights["a"].target == other
    desk.flights.target_unreadable(here, "unknown", 1, 0.0)
    assert sorted(str(flight.target) for flight in flights.values()) == sorted([here, other, other, other])


def test_a_lost_drafters_sessions_go_to_another_or_on_without():
    desk = Desk("T", "DE")
    flights = [desk.begin(name) for name in "ab"]
    assert desk.flights.drafter_lost(str(flights[0].drafter), 0.0) == 1
    assert flights[0].drafter == flights[1].drafter
    assert desk.flights.drafter_lost(str(flights[1].drafter), 0.0) == 2
    assert [flight.drafter for flight in flights] == [None, None]
    assert desk.flights.has_waiting
    desk.verdict(flights[0], 7)
    assert desk.out["a"] == [Emit((7,), 0, 0)]


def test_a_silent_drafter_is_given_up_and_named_and_its_sessions_move():
    desk = Desk("T", "DE")
    flights = [desk.begin(name) for name in "abc"]
    silent = str(flights[0].drafter)
    assert desk.fall_silent(flights[0]) == silent
    assert desk.flights.given_up == 1
    assert silent not in [flight.drafter for flight in flights]
    assert desk.flights.live_at_drafter(silent) == ()
    assert desk.begin("d").drafter != silent, "though it has fewer sessions than the other"


def test_where_there_is_no_other_a_silent_drafter_keeps_its_sessions_and_gets_no_more():
    desk = Desk("T", "D")
    flight = desk.begin("a")
    assert desk.fall_silent(flight) == "D"
    assert flight.drafter == "D"
    assert desk.begin("b").drafter is None


@pytest.mark.parametrize("changes", [{"attempt": 0}, {"source": "U"}], ids=["older attempt", "another target"])
def test_what_another_attempt_says_of_a_drafter_does_not_count(changes):
    """It may have had another drafter."""
    desk = Desk("T", "DE")
    flight = desk.begin()
    drafter = flight.drafter
    for _ in range(3 * TRIP_MISSES):
        assert desk.verdict(flight, answer=DraftAnswer.MISSED, **changes) is None
        desk.now += 1.0
    assert flight.drafter == drafter


def test_an_overloaded_drafter_is_left_for_another():
    desk = Desk("T", "DE")
    flight = desk.begin()
    first = str(flight.drafter)
    desk.refuse(flight, first)
    assert flight.drafter is None
    desk.flights.tick(0.0)
    assert flight.drafter not in (first, None)


def test_a_drafter_that_cannot_follow_gets_the_ledger_again():
    desk = Desk()
    flight = desk.begin()
    desk.verdict(flight, 7)
    desk.flights.drafter_says("D", Resync("s", 3, 1), 0.0)
    _, to, message = desk.sent[-1]
    assert (to, message.tokens) == ("D", (*PROMPT, 7))


def test_words_about_unknown_sessions_change_nothing():
    desk = Desk()
    assert desk.flights.target_says("T", Verdict("x", 1, 3, 1, (4,), 0, 0), 0.0) is None
    desk.flights.drafter_says("D", Resync("x", 3, 1), 0.0)
    assert desk.sent == []
