"""The drafter's book: following verdicts, asking for what was missed, and who wants a block."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.drafting import DraftBook, DrafterLimits, Proposal, Want
from cluster.verifier import Send
from protos.messages import (
    Attach,
    Block,
    Close,
    Finish,
    LiveSession,
    Refusal,
    RefusalReason,
    Resync,
    SparseProbs,
    Verdict,
)
from protos.prefix import Prefix
from tests.unit.cluster.samples import KEY, an_open

ROUTER, TARGET = "router#1", "t1"
LIMITS = DrafterLimits(vocabulary=50, max_context=100, max_sessions=3)


def hash_of(*tokens: int) -> int:
    return Prefix(KEY, tokens).hash


class Book:
    """A book with a target that says what tests tell it to."""

    def __init__(self, draft_ahead: bool = False) -> None:
        self.book = DraftBook(LIMITS, draft_ahead)

    def open(self, session: str = "s", router: str = ROUTER, **changes: Any) -> list[Send]:
        return self.book.open(router, an_open(session, **{"tokens": (1, 2), "target_address": TARGET} | changes))

    def verdict(self, before: tuple[int, ...], *tokens: int, session: str = "s", **changes: Any) -> list[Send]:
        verdict = Verdict(session, 1, len(before), hash_of(*before), tokens, 0, 0)
        return self.book.verdict(TARGET, replace(verdict, **changes))

    def want(self) -> Want:
        (want,) = self.book.wants(9)
        return want

    def propose(self, want: Want, *tokens: int) -> list[Send]:
        session = want.open.session
        return self.book.proposed([Proposal(session, len(want.tokens), want.prefix_hash, tokens, ahead=want.ahead)])


def test_a_session_is_attached_drafted_for_once_and_again_after_its_verdict():
    desk = Book()
    assert desk.open() == [(TARGET, Attach("s", 2, hash_of(1, 2)))]
    want = desk.want()
    assert (want.tokens, want.prefix_hash, want.max_tokens) == ((1, 2), hash_of(1, 2), 4)
    assert desk.book.wants(9) == [], "one block for one length"
    assert desk.propose(want, 5, 6) == [(TARGET, Block("s", 2, hash_of(1, 2), (5, 6)))]
    assert desk.verdict((1, 2), 5, 7) == []
    assert desk.want().tokens == (1, 2, 5, 7)


def test_a_block_that_a_verdict_overtook_is_not_sent():
    desk = Book()
    desk.open()
    want = desk.want()
    desk.verdict((1, 2), 9)
    assert desk.propose(want, 5, 6) == []
    assert desk.book.counts["overtaken"] == 1


def test_a_block_drafted_for_a_history_that_was_reopened_is_not_sent():
    """Same length, other tokens: only the hash tells them apart."""
    desk = Book()
    desk.open()
    want = desk.want()
    desk.open(tokens=(1, 3), attempt=2)
    assert desk.propose(want, 5) == []


def test_nothing_to_propose_is_no_block():
    desk = Book()
    desk.open()
    assert desk.propose(desk.want()) == []


def test_blocks_end_before_the_last_position():
    """A verdict brings one token more than its block: drafting it, too, would be for nothing."""
    desk = Book()
    desk.open(max_len=5)
    assert desk.want().max_tokens == 2
    desk.verdict((1, 2), 7, 7)
    assert desk.book.wants(9) == []


# ---------------------------------------------------------------- following the target


def test_a_gap_is_asked_for_and_the_catch_up_closes_it():
    desk = Book()
    desk.open()
    assert desk.verdict((1, 2, 3), 4) == [(TARGET, Attach("s", 2, hash_of(1, 2)))]
    assert desk.verdict((1, 2), 3, 4) == []
    assert desk.want().tokens == (1, 2, 3, 4)


def test_verdicts_that_overlap_or_repeat_add_only_what_is_new():
    """A catch-up verdict and the ordinary ones cross on the wire."""
    desk = Book()
    desk.open()
    desk.verdict((1, 2), 3)
    desk.verdict((1, 2), 3, 4, 5)
    desk.verdict((1, 2), 3)
    assert desk.want().tokens == (1, 2, 3, 4, 5)


def test_a_contradiction_goes_to_the_router_and_its_ledger_heals_it():
    desk = Book()
    desk.open()
    assert desk.verdict((1, 9), 4) == [(ROUTER, Resync("s", 2, hash_of(1, 2)))]
    desk.open(tokens=(1, 9, 4))
    assert desk.want().tokens == (1, 9, 4)


def test_a_resync_stops_drafting_until_the_ledger_comes():
    desk = Book()
    desk.open()
    assert desk.book.resync(TARGET, Resync("s", 5, 5)) == [(ROUTER, Resync("s", 2, hash_of(1, 2)))]
    assert desk.book.wants(9) == []
    assert desk.open(tokens=(1, 3)) == [(TARGET, Attach("s", 2, hash_of(1, 3)))]
    assert desk.want().tokens == (1, 3)


FOREIGN = {
    "another target's": ("t2", {}),
    "an older attempt's": (TARGET, {"attempt": 0}),
    "an unknown session's": (TARGET, {"session": "unknown"}),
}


@pytest.mark.parametrize(("target", "changes"), FOREIGN.values(), ids=FOREIGN)
def test_a_verdict_that_is_not_this_sessions_is_counted_and_changes_nothing(target, changes):
    desk = Book()
    desk.open()
    verdict = replace(Verdict("s", 1, 2, hash_of(1, 2), (5,), 0, 0), **changes)
    assert desk.book.verdict(target, verdict) == []
    assert desk.book.counts["verdict_unknown"] == 1
    assert desk.want().tokens == (1, 2)


def test_an_end_frees_the_session_and_its_method_hears_of_it_once():
    desk = Book()
    desk.open()
    desk.verdict((1, 2), 0, finish=Finish.STOP)
    assert not desk.book.is_idle, "the method still holds it"
    assert desk.book.take_closed() == ["s"]
    assert desk.book.take_closed() == []
    assert desk.book.is_idle


def test_a_session_that_was_closed_and_opened_again_is_not_forgotten():
    desk = Book()
    desk.open()
    desk.book.close(ROUTER, Close("s", 1))
    desk.open(attempt=2)
    assert desk.book.take_closed() == []


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=20))
def test_whatever_verdicts_are_lost_doubled_or_reordered_the_prefix_is_the_targets(pieces):
    """Any slices of the target's text, in any order: what the drafter holds is always a prefix of it."""
    target_text = (1, 2, *range(3, 20))
    desk = Book()
    desk.open(max_len=50)
    for skip, count in pieces:
        begin = 2 + skip
        desk.verdict(target_text[:begin], *target_text[begin : begin + count])
        for want in desk.book.wants(9):
            assert want.tokens == target_text[: len(want.tokens)]
            assert want.prefix_hash == hash_of(*want.tokens)


# ---------------------------------------------------------------- routers and targets come and go


def test_refusals_say_what_is_wrong():
    desk = Book()
    for number in range(3):
        desk.open(f"s{number}")
    for changes, reason, why in (
        ({}, RefusalReason.OVERLOADED, "3 sessions"),
        ({"tokens": (50,)}, RefusalReason.INVALID, "vocabulary"),
        ({"max_len": 101}, RefusalReason.INVALID, "context"),
        ({"target_address": ""}, RefusalReason.INVALID, "target_address"),
    ):
        ((receiver, refusal),) = desk.open("new", **changes)
        assert isinstance(refusal, Refusal)
        assert (receiver, refusal.reason) == (ROUTER, reason)
        assert why in refusal.message
    ((receiver, _),) = desk.open("s0", attempt=2)
    assert receiver == TARGET, "a full drafter still reopens what it has"


def test_an_older_open_and_a_foreign_close_change_nothing():
    desk = Book()
    desk.open(attempt=2)
    assert desk.open(tokens=(9, 9), attempt=1) == []
    desk.book.close(ROUTER, Close("s", 1))
    desk.book.close("other#1", Close("s", 9))
    desk.book.close(ROUTER, Close("unknown", 9))
    assert desk.want().tokens == (1, 2)


def test_a_broken_stream_to_the_target_stops_drafting_until_it_is_back():
    desk = Book()
    desk.open()
    desk.book.target_gone(TARGET)
    assert desk.book.wants(9) == []
    assert desk.book.target_up("t2") == []
    assert desk.book.target_up(TARGET) == [(TARGET, Attach("s", 2, hash_of(1, 2)))]
    assert desk.want().tokens == (1, 2)


def test_a_router_that_is_gone_or_does_not_list_a_session_frees_it():
    desk = Book()
    desk.open("a")
    desk.open("b")
    desk.open("c", "other#1")
    desk.book.hello("router#2", [LiveSession("a", 1)])
    assert desk.book.take_closed() == ["b"]
    desk.book.router_gone(ROUTER)
    assert desk.book.take_closed() == [], "the old stream's end, heard late, is nothing to the new one"
    desk.book.router_gone("router#2")
    assert desk.book.take_closed() == ["a"]
    assert desk.book.targets == {TARGET}
    assert desk.book.load() == {"sessions": 1.0}


def test_the_longest_unserved_session_comes_first():
    desk = Book()
    for name in "abc":
        desk.open(name)
    assert [want.open.session for want in desk.book.wants(2)] == ["a", "b"]
    desk.verdict((1, 2), 7, session="a")
    assert [want.open.session for want in desk.book.wants(9)] == ["c", "a"]


# ---------------------------------------------------------------- drafting ahead


def ahead_of(desk: Book) -> Want:
    desk.propose(desk.want(), 5, 6)
    (want,) = desk.book.wants_ahead(9)
    return want


def test_drafting_ahead_guesses_the_next_token_and_sends_the_block_after_it():
    desk = Book(draft_ahead=True)
    desk.open()
    want = ahead_of(desk)
    assert (want.tokens, want.prefix_hash, want.ahead) == ((1, 2, 5, 6), hash_of(1, 2, 5, 6), True)
    assert want.max_tokens == 1 + 4, "the guess, and a block as long as an ordinary one"
    assert desk.book.wants_ahead(9) == []
    assert desk.propose(want, 7, 8, 9) == [(TARGET, Block("s", 5, hash_of(1, 2, 5, 6, 7), (8, 9)))]


def test_a_right_guess_saves_the_next_draft_and_a_wrong_one_costs_nothing_else():
    for bonus, wants in ((7, 0), (17, 1)):
        desk = Book(draft_ahead=True)
        desk.open()
        desk.propose(ahead_of(desk), 7, 8, 9)
        desk.verdict((1, 2), 5, 6, bonus)
        assert len(desk.book.wants(9)) == wants
        assert desk.book.counts["guess_miss"] == wants


def test_a_guess_that_is_drafted_while_its_verdict_arrives_is_sent_only_if_right():
    for bonus, sent in ((7, 1), (17, 0)):
        desk = Book(draft_ahead=True)
        desk.open()
        want = ahead_of(desk)
        desk.verdict((1, 2), 5, 6, bonus)
        assert len(desk.propose(want, 7, 8)) == sent


def test_the_draft_probs_of_a_block_that_was_drafted_ahead_are_its_own():
    """One row off, and every token would be weighed against another's distribution."""
    probs = SparseProbs(((7,), (8,), (9,)), ((1,), (2,), (3,)))
    block = Proposal("s", 4, hash_of(1, 2, 5, 6), (7, 8, 9), probs, ahead=True).after_guess()
    assert block.tokens == (8, 9)
    assert block.draft_probs == SparseProbs(((8,), (9,)), ((2,), (3,)))


def test_nothing_is_drafted_ahead_past_the_end_or_when_switched_off():
    for draft_ahead, max_len in ((True, 6), (False, 40)):
        desk = Book(draft_ahead)
        desk.open(max_len=max_len)
        desk.propose(desk.want(), 5, 6)
        assert desk.book.wants_ahead(9) == []
