"""Hidden states at the drafter: in order, of its own text, before it drafts; the rest is dropped and counted."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.drafting.hidden_state_receiver import MOST_EARLY, NO_BOUNDS, StateBounds
from cluster.drafting.method import DraftingPass
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.envelope import Send, states_stream
from protos.messages import (
    Attach,
    Close,
    Detach,
    DraftRequest,
    NoDraft,
    Refusal,
    RefusalReason,
    Resync,
    StateDtype,
    States,
    StatesAck,
    StatesFormat,
    Verdict,
)
from protos.prefix import Prefix
from tests.unit.cluster.samples import KEY, an_open

ROUTER = "router#1"
TARGET = "t1"
APART = states_stream(TARGET)
LAYOUT = StatesFormat(2, StateDtype.BFLOAT16)
PROMPT = (5, 6, 7, 8)


def rows_of(tokens: tuple[int, ...]) -> bytes:
    return b"".join(bytes([token]) * LAYOUT.row_bytes for token in tokens)


def some_states(tokens: tuple[int, ...], first: int, end: int, **changes: Any) -> States:
    """The states of a text's positions `first` to `end`."""
    prefix_hash = Prefix(KEY, tokens[:end]).hash
    made = States("s", first, prefix_hash, LAYOUT.dtype, LAYOUT.width, rows_of(tokens[first:end]))
    return replace(made, **changes)


class Desk:
    """A drafter whose method reads states, with one session that is attached and asked for blocks."""

    def __init__(self, layout: StatesFormat | None = LAYOUT, bounds: StateBounds = NO_BOUNDS) -> None:
        self.scheduler = DraftScheduler(DrafterLimits(50, 100, 3, layout, bounds), draft_ahead=False)
        self.told: list[tuple[str, int, bytes]] = []  # of states
        self.opened = self.scheduler.receive(ROUTER, an_open(tokens=PROMPT, target_address=TARGET), 0.0)

    def receive(self, message: Any, peer: str = TARGET) -> list[Send]:
        return self.scheduler.receive(peer, message, 0.0)

    def verdict(self, before: tuple[int, ...], *tokens: int) -> list[Send]:
        return self.receive(Verdict("s", 1, len(before), Prefix(KEY, before).hash, tokens, 0, 0))

    def request(self, after: tuple[int, ...]) -> list[Send]:
        return self.receive(DraftRequest("s", 1, len(after), Prefix(KEY, after).hash, 4))

    def asked(self) -> tuple[DraftRequest, ...]:
        return self._next().requests

    def rows(self) -> dict[str, int]:
        """Returns the number of rows that the method has, by session."""
        self._next()
        found: dict[str, int] = {}
        for session, first, rows in self.told:
            assert first == found.get(session, 0)
            found[session] = first + len(rows) // LAYOUT.row_bytes
        return found

    def _next(self) -> DraftingPass:
        drafting = self.scheduler.next_pass(9, 9)
        self.told += drafting.updates.states
        return drafting

    @property
    def counts(self) -> dict[str, int]:
        return {cause: n for cause, n in self.scheduler.counts.items() if cause.startswith("states")}


def ack(have_len: int) -> Send:
    return APART, StatesAck("s", have_len)


def attach(tokens: tuple[int, ...], states_from: int | None, states_by: int | None = None) -> Send:
    return TARGET, Attach("s", len(tokens), Prefix(KEY, tokens).hash, states_from, states_by=states_by)


def test_it_attaches_with_what_it_lacks_and_drafts_once_that_is_here():
    desk = Desk()
    assert desk.opened == [attach(PROMPT, 0)]
    assert desk.request(PROMPT) == [(TARGET, NoDraft("s", 4, Prefix(KEY, PROMPT).hash))], "nobody is to wait for it"
    assert desk.asked() == ()
    assert desk.receive(some_states(PROMPT, 0, 2), APART) == [ack(2)]
    assert desk.asked() == ()
    assert desk.receive(some_states(PROMPT, 2, 3), APART) == [ack(3)]
    (request,) = desk.asked()
    assert request.base_len == 4, "the last token's states need not be here: the target has yet to read it"
    assert b"".join(rows for _, _, rows in desk.told) == rows_of(PROMPT[:3])


def test_a_method_hears_of_states_at_once_while_it_still_waits():
    """It may work on them: a prompt takes long."""
    desk = Desk()
    desk.receive(some_states(PROMPT, 0, 2), APART)
    drafting = desk.scheduler.next_pass(9, 9)
    assert not drafting.is_empty
    assert [(session, first) for session, first, _ in drafting.updates.states] == [("s", 0)]
    assert desk.scheduler.next_pass(9, 9).is_empty


def test_a_method_that_reads_the_latest_alone_asks_for_no_more():
    desk = Desk(bounds=StateBounds(window=1))
    assert desk.opened == [attach(PROMPT, 2)]
    assert desk.request(PROMPT) == [(TARGET, NoDraft("s", 4, Prefix(KEY, PROMPT).hash))]
    desk.verdict(PROMPT, 9)
    desk.receive(some_states((*PROMPT, 9), 2, 4))
    desk.request((*PROMPT, 9))
    (request,) = desk.asked()
    assert request.base_len == 5
    assert desk.told == [("s", 2, rows_of((7, 8)))]
    assert Desk(bounds=StateBounds(window=9)).opened == [attach(PROMPT, 0)], "of a shorter text it is all"


def test_where_the_latest_are_enough_they_may_begin_in_mid_text():
    desk = Desk(bounds=StateBounds(enough=1))
    assert desk.opened == [attach(PROMPT, 0, 2)]
    assert desk.receive(some_states(PROMPT, 2, 3), APART) == [ack(3)]
    desk.request(PROMPT)
    assert [request.base_len for request in desk.asked()] == [4]
    assert desk.told == [("s", 2, rows_of((7,)))]
    desk.receive(some_states(PROMPT, 0, 3), APART)
    assert desk.counts == {"states": 1, "states_known": 1}, "what comes before is of no use any more"
    assert desk.receive(some_states((*PROMPT, 9), 4, 5)) == []
    assert desk.verdict(PROMPT, 9) == [attach((*PROMPT, 9), 3)], "once they have begun a gap is a gap"


@pytest.mark.parametrize(("enough", "by"), [(2, 1), (3, None), (9, None)])
def test_they_begin_no_later_than_there_are_enough(enough, by):
    desk = Desk(bounds=StateBounds(enough=enough))
    assert desk.opened == [attach(PROMPT, 0, by)]
    assert desk.receive(some_states(PROMPT, 2, 3), APART) == [attach(PROMPT, 0, by)]
    desk.receive(some_states(PROMPT, 0, 1), APART)
    assert desk.receive(some_states(PROMPT, 2, 3), APART) == [attach(PROMPT, 1)]


def test_a_session_that_began_in_mid_text_keeps_no_more_than_it_has():
    desk = Desk(bounds=StateBounds(enough=1, most=5))
    desk.receive(some_states(PROMPT, 2, 3), APART)
    assert isinstance(opened_with(desk, "t", (1, 2, 3, 4, 5))[0][1], Refusal)
    assert isinstance(opened_with(desk, "u", (1, 2, 3, 4))[0][1], Attach)


def test_what_rides_with_a_verdict_is_there_before_the_block_is_asked_for():
    desk = Desk()
    desk.receive(some_states(PROMPT, 0, 3), APART)
    assert desk.verdict(PROMPT, 9) == []
    assert desk.receive(some_states((*PROMPT, 9), 3, 4)) == [], "what rides is not acknowledged"
    assert desk.request((*PROMPT, 9)) == []
    (request,) = desk.asked()
    assert request.base_len == 5
    assert desk.rows() == {"s": 4}


def test_a_method_that_reads_none_asks_for_none_and_waits_for_none():
    desk = Desk(layout=None)
    assert desk.opened == [attach(PROMPT, None)]
    assert desk.request(PROMPT) == []
    assert len(desk.asked()) == 1
    assert desk.receive(some_states(PROMPT, 0, 3)) == []
    assert desk.counts == {"states_unfit": 1}
    assert desk.rows() == {}


def test_states_that_come_before_their_tokens_wait_for_the_verdict():
    """Two streams know no order between them."""
    desk = Desk()
    text = (*PROMPT, 9, 10)
    desk.receive(some_states(text, 0, 4), APART)
    desk.receive(some_states(text, 4, 5), APART)
    assert desk.rows() == {"s": 4}
    assert desk.verdict(PROMPT, 9, 10) == [ack(5)]
    assert desk.rows() == {"s": 5}


def test_no_more_than_so_many_wait():
    desk = Desk()
    text = (*PROMPT, *range(9, 9 + 12))
    for _ in range(MOST_EARLY + 2):
        desk.receive(some_states(text, 0, len(text)), APART)
    assert desk.counts == {"states_early": 2}


def test_states_of_another_text_are_dropped():
    desk = Desk()
    other = (5, 6, 9, 8)
    assert desk.receive(some_states(other, 0, 3), APART) == []
    assert desk.counts == {"states_mismatch": 1}
    assert desk.rows() == {}


@pytest.mark.parametrize("change", [{"width": 4, "rows": bytes(8)}, {"dtype": StateDtype.FLOAT8, "rows": bytes(6)}])
def test_states_of_another_layout_are_dropped(change):
    desk = Desk()
    desk.receive(some_states(PROMPT, 0, 1, **change), APART)
    assert desk.counts == {"states_unfit": 1}
    assert desk.rows() == {}


@pytest.mark.parametrize("peer", ["t2", states_stream("t2"), ROUTER])
def test_states_from_anybody_but_the_sessions_target_are_dropped(peer):
    desk = Desk()
    desk.receive(some_states(PROMPT, 0, 3), peer)
    desk.receive(some_states(PROMPT, 0, 3, session="unknown"), APART)
    assert desk.counts == {"states_unknown": 2}


def test_what_comes_twice_counts_once_and_of_an_overlap_the_new_part():
    desk = Desk()
    desk.receive(some_states(PROMPT, 0, 2), APART)
    assert desk.receive(some_states(PROMPT, 0, 2), APART) == [ack(2)], "the target may not have heard it"
    desk.receive(some_states(PROMPT, 1, 3), APART)
    assert desk.rows() == {"s": 3}
    assert b"".join(rows for _, _, rows in desk.told) == rows_of(PROMPT[:3])
    assert desk.counts == {"states": 3, "states_known": 1}


def test_a_gap_is_asked_for_once_and_again_when_the_text_has_grown():
    desk = Desk()
    desk.receive(some_states(PROMPT, 0, 1), APART)
    assert desk.receive(some_states(PROMPT, 2, 3), APART) == [attach(PROMPT, 1)]
    assert desk.receive(some_states(PROMPT, 3, 4), APART) == [ack(1)], "it is asked for already"
    desk.verdict(PROMPT, 9)
    assert desk.receive(some_states((*PROMPT, 9), 4, 5), APART) == [attach((*PROMPT, 9), 1)]
    desk.receive(some_states((*PROMPT, 9), 1, 5), APART)
    assert desk.rows() == {"s": 5}


def test_a_new_stream_asks_for_what_is_still_lacking():
    desk = Desk()
    desk.receive(some_states(PROMPT, 0, 2), APART)
    desk.scheduler.gone(TARGET)
    assert desk.scheduler.connected(TARGET) == [attach(PROMPT, 2)]


def test_a_session_that_begins_anew_begins_without_states():
    desk = Desk()
    desk.receive(some_states(PROMPT, 0, 3), APART)
    desk.receive(Resync("s", 4, 0))
    again = desk.scheduler.receive(ROUTER, an_open(tokens=PROMPT, target_address=TARGET, attempt=2), 0.0)
    assert again == [attach(PROMPT, 0)]
    assert desk.rows() == {}, "what was collected was for a session that is over"


def opened_with(desk: Desk, session: str, tokens: tuple[int, ...]) -> list[Send]:
    return desk.receive(an_open(session, tokens=tokens, target_address=TARGET), ROUTER)


def test_a_session_without_room_for_its_states_is_refused_until_there_is():
    desk = Desk(bounds=StateBounds(most=7))
    desk.receive(some_states(PROMPT, 0, 3), APART)
    ((to, refusal),) = opened_with(desk, "t", (1, 2, 3, 4, 5))
    assert to == ROUTER
    assert isinstance(refusal, Refusal)
    assert (refusal.session, refusal.reason) == ("t", RefusalReason.OVERLOADED)
    assert refusal.message == "hidden states of 3 tokens are kept, and there is room for 7"
    assert len(opened_with(desk, "u", (1, 2, 3, 4))) == 1
    again = desk.receive(an_open(tokens=(*PROMPT, 9, 10, 11), target_address=TARGET, attempt=2), ROUTER)
    assert [type(message) for _, message in again] == [Attach], "in the place of its own"
    desk.receive(Close("s", 2), ROUTER)
    desk.receive(Close("u", 1), ROUTER)
    assert isinstance(opened_with(desk, "t", (1, 2, 3, 4, 5))[0][1], Attach)


def test_a_session_that_grows_beyond_the_bound_is_given_up_and_another_goes_on():
    desk = Desk(bounds=StateBounds(most=5))
    other = (1, 2, 3)
    opened_with(desk, "t", other)
    desk.receive(some_states(other, 0, 2, session="t"), APART)
    desk.receive(some_states(PROMPT, 0, 3), APART)
    assert desk.verdict(PROMPT, 9) == []
    (to_router, refusal), detach = desk.receive(some_states((*PROMPT, 9), 3, 4), APART)
    assert (to_router, type(refusal)) == (ROUTER, Refusal)
    assert detach == (TARGET, Detach("s"))
    assert desk.scheduler.counts["given_up"] == 1
    assert desk.rows() == {"t": 2}, "nothing of the other is left for the method"
    assert desk.receive(some_states(other, 2, 3, session="t"), APART) == [(APART, StatesAck("t", 3))]


def test_of_a_method_that_reads_the_latest_alone_a_session_takes_one():
    desk = Desk(bounds=StateBounds(window=1, most=2))
    assert isinstance(opened_with(desk, "t", (1, 2, 3, 4, 5))[0][1], Attach)
    assert isinstance(opened_with(desk, "u", (1, 2))[0][1], Refusal)


def test_nothing_is_kept_of_a_session_that_is_closed():
    desk = Desk()
    desk.receive(some_states(PROMPT, 0, 3), APART)
    desk.receive(some_states((*PROMPT, 9), 3, 5), APART)
    desk.receive(Close("s", 1), ROUTER)
    drafting = desk.scheduler.next_pass(0, 0)
    assert drafting.updates.states == ()
    assert desk.scheduler.is_idle
