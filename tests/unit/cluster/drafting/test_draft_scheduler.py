"""The drafter's scheduler: following verdicts, asking for what was missed, and who wants a block."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.drafting.method import DraftingPass
from cluster.drafting.requests import AheadRequest, Proposal, SessionTexts
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.session_table import LEAST_WINDOW, DrafterLimits, StepIntervalEstimate
from cluster.envelope import Send
from protos.draft_tree import NO_TREE, DraftTree, SparseProbs
from protos.messages import (
    AssignmentToken,
    Attach,
    Block,
    Close,
    Detach,
    DraftAnswer,
    DraftRequest,
    Finish,
    Hello,
    LiveSession,
    NoDraft,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    Shape,
    Verdict,
)
from protos.prefix import Prefix
from tests.unit.cluster.samples import KEY, an_open

ROUTER = "router#1"
TARGET = "t1"
LIMITS = DrafterLimits(vocabulary=50, max_context=100, max_sessions=3)


def hash_of(*tokens: int) -> int:
    return Prefix(KEY, tokens).hash


@dataclass(frozen=True)
class Want:
    """What is asked of a method, and the text that it has of the session by then."""

    request: DraftRequest | AheadRequest
    open: Open
    tokens: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        return self.request.max_tokens

    @property
    def prefix_hash(self) -> int:
        return self.request.prefix_hash

    @property
    def least_chance(self) -> float:
        return self.request.least_chance

    @property
    def unverified(self) -> DraftTree:
        return self._ahead.unverified

    @property
    def until(self) -> float:
        return self._ahead.until

    @property
    def _ahead(self) -> AheadRequest:
        assert isinstance(self.request, AheadRequest)
        return self.request


class Desk:
    """A scheduler with a target that says what tests tell it to, and a method that hears the news."""

    def __init__(self, draft_ahead: bool = False, shapes: frozenset[Shape] = frozenset(Shape)) -> None:
        self.scheduler = DraftScheduler(LIMITS, draft_ahead, shapes)
        self.now = 0.0
        self._texts = SessionTexts()
        self._closed: list[str] = []  # as far as the method has heard

    def open(self, session: str = "s", router: str = ROUTER, asks: int | None = None, **changes: Any) -> list[Send]:
        """The target answers that it asks for blocks of `asks` tokens; None: it has not answered yet."""
        request = an_open(session, **{"tokens": (1, 2), "target_address": TARGET} | changes)
        sends = self.scheduler.receive(router, request, 0.0)
        if asks is not None and any(isinstance(message, Attach) for _, message in sends):
            self.scheduler.receive(request.target_address, self.answer(request, asks), self.now)
        return sends

    def answer(self, request: Open, asks: int) -> DraftRequest:
        """What the target says to an Attach that missed nothing."""
        length = len(request.tokens)
        prefix_hash = hash_of(*request.tokens)
        return DraftRequest(request.session, request.attempt, length, prefix_hash, asks)

    def verdict(self, before: tuple[int, ...], *tokens: int, session: str = "s", **changes: Any) -> list[Send]:
        """And what is wanted after it: `max_tokens`, `hold_step`, `least_chance`."""
        verdict = Verdict(session, 1, len(before), hash_of(*before), tokens, 0, 0)
        wanted = {name: changes.pop(name) for name in ("max_tokens", "hold_step", "least_chance") if name in changes}
        sends = self.scheduler.receive(TARGET, replace(verdict, **changes), self.now)
        return sends + self.request((*before, *tokens), session, **wanted)

    def request(self, after: tuple[int, ...], session: str = "s", **wanted: Any) -> list[Send]:
        request = DraftRequest(session, 1, len(after), hash_of(*after), **wanted)
        return self.scheduler.receive(TARGET, request, self.now)

    def wants(self, limit: int) -> list[Want]:
        """Sessions that want a block now."""
        return self._hear(self.scheduler.next_pass(limit, ahead_limit=0))

    def wants_ahead(self, limit: int) -> list[Want]:
        """Sessions whose verdict is not in, where none wants a block now."""
        return self._hear(self.scheduler.next_pass(0, ahead_limit=limit))

    def closed(self) -> list[str]:
        """Sessions that the method has heard to be over since this was asked last."""
        self._hear(self.scheduler.next_pass(0, ahead_limit=0))
        closed = self._closed
        self._closed = []
        return closed

    def _hear(self, drafting: DraftingPass) -> list[Want]:
        self._texts.close(drafting.news.closed)
        self._closed += drafting.news.closed
        for request in drafting.news.opened:
            self._texts.open(request)
        for session, tokens in drafting.news.committed:
            self._texts.committed(session, tokens)
        return [self._want(request) for request in drafting.requests or drafting.ahead]

    def _want(self, request: DraftRequest | AheadRequest) -> Want:
        text = self._texts[request.session]
        assert (len(text.tokens), hash_of(*text.tokens)) == (request.base_len, request.prefix_hash)
        return Want(request, text.open, tuple(text.tokens))

    def want(self) -> Want:
        (want,) = self.wants(9)
        return want

    def propose(self, want: Want, *tokens: int) -> list[Send]:
        request = want.request
        proposal = Proposal(request.session, request.base_len, request.prefix_hash, DraftTree.chain(tokens))
        return self.scheduler.proposed([proposal], self.now)

    def ahead(self) -> Want:
        (want,) = self.wants_ahead(9)
        return want

    def guess(self, want: Want, outcome: tuple[int, ...], *tokens: int) -> list[Send]:
        """A block for the case that the verdict brings just `outcome`."""
        before = (*want.tokens, *outcome)
        return self.scheduler.proposed(
            [Proposal(want.open.session, len(before), hash_of(*before), DraftTree.chain(tokens), outcome)], self.now
        )


def test_a_session_is_attached_drafted_for_once_and_again_after_its_verdict():
    desk = Desk()
    assert desk.open() == [(TARGET, Attach("s", 2, hash_of(1, 2)))]
    want = desk.want()
    assert (want.tokens, want.prefix_hash, want.max_tokens) == ((1, 2), hash_of(1, 2), 4)
    assert desk.wants(9) == [], "one block for one length"
    assert desk.propose(want, 5, 6) == [(TARGET, Block("s", 2, hash_of(1, 2), DraftTree.chain((5, 6))))]
    assert desk.verdict((1, 2), 5, 7) == []
    assert desk.want().tokens == (1, 2, 5, 7)


def test_a_block_that_a_verdict_overtook_is_not_sent():
    desk = Desk()
    desk.open()
    want = desk.want()
    desk.verdict((1, 2), 9)
    assert desk.propose(want, 5, 6) == []
    assert desk.scheduler.counts["overtaken"] == 1


def test_a_block_drafted_for_a_history_that_was_reopened_is_not_sent():
    """Same length, other tokens: only the hash tells them apart."""
    desk = Desk()
    desk.open()
    want = desk.want()
    desk.open(tokens=(1, 3), attempt=2)
    assert desk.propose(want, 5) == []


def test_nothing_to_propose_is_no_block_and_is_said_so():
    desk = Desk()
    desk.open()
    assert desk.propose(desk.want()) == [(TARGET, NoDraft("s", 2, hash_of(1, 2)))]
    assert desk.scheduler.counts["nothing_to_propose"] == 1


def test_blocks_end_before_the_last_position():
    """A verdict brings one token more than its block: drafting it, too, would be for nothing."""
    desk = Desk()
    desk.open(max_len=5)
    assert desk.want().max_tokens == 2
    desk.verdict((1, 2), 7, 7)
    assert desk.wants(9) == []


# ---------------------------------------------------------------- following the target


def test_a_gap_is_asked_for_and_the_catch_up_closes_it():
    desk = Desk()
    desk.open()
    assert desk.verdict((1, 2, 3), 4) == [(TARGET, Attach("s", 2, hash_of(1, 2)))]
    assert desk.verdict((1, 2), 3, 4) == []
    assert desk.want().tokens == (1, 2, 3, 4)


def test_verdicts_that_overlap_or_repeat_add_only_what_is_new():
    """A catch-up verdict and the ordinary ones cross on the wire."""
    desk = Desk()
    desk.open()
    desk.verdict((1, 2), 3)
    desk.verdict((1, 2), 3, 4, 5)
    desk.verdict((1, 2), 3)
    assert desk.want().tokens == (1, 2, 3, 4, 5)


def test_a_contradiction_goes_to_the_router_and_its_ledger_heals_it():
    desk = Desk()
    desk.open()
    assert desk.verdict((1, 9), 4) == [(ROUTER, Resync("s", 2, hash_of(1, 2)))]
    desk.open(tokens=(1, 9, 4))
    assert desk.want().tokens == (1, 9, 4)


def test_a_resync_stops_drafting_until_the_ledger_comes():
    desk = Desk()
    desk.open()
    assert desk.scheduler.receive(TARGET, Resync("s", 5, 5), desk.now) == [(ROUTER, Resync("s", 2, hash_of(1, 2)))]
    assert desk.wants(9) == []
    assert desk.open(tokens=(1, 3)) == [(TARGET, Attach("s", 2, hash_of(1, 3)))]
    assert desk.want().tokens == (1, 3)


FOREIGN = {
    "another target's": ("t2", {}),
    "an older attempt's": (TARGET, {"attempt": 0}),
    "an unknown session's": (TARGET, {"session": "unknown"}),
}


@pytest.mark.parametrize(("target", "changes"), FOREIGN.values(), ids=FOREIGN)
def test_a_verdict_that_is_not_this_sessions_is_counted_and_changes_nothing(target, changes):
    desk = Desk()
    desk.open()
    verdict = replace(Verdict("s", 1, 2, hash_of(1, 2), (5,), 0, 0), **changes)
    assert desk.scheduler.receive(target, verdict, desk.now) == []
    assert desk.scheduler.counts["verdict_unknown"] == 1
    assert desk.want().tokens == (1, 2)


def test_an_end_frees_the_session_and_its_method_hears_of_it_once():
    desk = Desk()
    desk.open()
    desk.verdict((1, 2), 0, finish=Finish.STOP)
    assert not desk.scheduler.is_idle, "the method still holds it"
    assert desk.closed() == ["s"]
    assert desk.closed() == []
    assert desk.scheduler.is_idle


def test_a_session_that_was_opened_again_begins_anew_in_its_method_and_is_named_once():
    """What the method remembers of it may be what was wrong."""
    desk = Desk()
    desk.open()
    desk.scheduler.receive(ROUTER, Close("s", 1), desk.now)
    desk.open(attempt=2)
    desk.open(attempt=3)
    assert desk.closed() == ["s"]
    assert desk.want().open.attempt == 3


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=20))
def test_whatever_verdicts_are_lost_doubled_or_reordered_the_prefix_is_the_targets(pieces):
    """Any slices of the target's text, in any order: what the drafter holds is always a prefix of it."""
    target_text = (1, 2, *range(3, 20))
    desk = Desk()
    desk.open(max_len=50)
    for skip, count in pieces:
        begin = 2 + skip
        desk.verdict(target_text[:begin], *target_text[begin : begin + count])
        for want in desk.wants(9):
            assert want.tokens == target_text[: len(want.tokens)]
            assert want.prefix_hash == hash_of(*want.tokens)


# ---------------------------------------------------------------- as much as the target asks for


def test_blocks_are_as_long_as_the_target_asked_for_with_its_verdict():
    desk = Desk(draft_ahead=True)
    desk.open()
    desk.verdict((1, 2), 3, max_tokens=2)
    want = desk.want()
    assert want.max_tokens == 2
    desk.propose(want, 5, 6)
    assert desk.ahead().max_tokens == 2
    desk.verdict((1, 2, 3), 5, max_tokens=99)
    assert desk.want().max_tokens == 4, "but never longer than the session may have"


def test_nothing_is_drafted_while_the_target_asks_for_nothing():
    desk = Desk(draft_ahead=True)
    desk.open()
    desk.verdict((1, 2), 3, max_tokens=0)
    assert desk.wants(9) == []
    assert not desk.scheduler.has_requests
    desk.verdict((1, 2, 3), 4, max_tokens=1)
    assert desk.want().tokens == (1, 2, 3, 4)


# ---------------------------------------------------------------- routers and targets come and go


def test_while_a_target_asks_for_nothing_a_new_session_of_it_is_not_drafted_for_before_it_says_so():
    """Reading a prompt takes long, and is for nothing where speculation does not pay."""
    desk = Desk()
    desk.open("resting", asks=0)
    desk.open()
    assert desk.wants(9) == []
    assert not desk.scheduler.has_requests
    assert desk.request((1, 2), max_tokens=3, least_chance=0.5) == []
    want = desk.want()
    assert (want.open.session, want.max_tokens, want.least_chance) == ("s", 3, 0.5)
    desk.scheduler.receive(ROUTER, Close("resting", 1), desk.now)
    desk.open("at another", target_address="t2", asks=0)
    desk.open("here again")
    assert desk.want().open.session == "here again"


def test_of_a_target_that_is_back_nothing_is_known():
    desk = Desk()
    desk.open("resting", asks=0)
    desk.scheduler.gone(TARGET)
    desk.open()
    assert desk.want().open.session == "s"


def test_what_an_old_verdict_asked_for_that_comes_once_more_is_not_asked_for():
    desk = Desk()
    desk.open()
    desk.verdict((1, 2), 3, max_tokens=2)
    desk.verdict((1, 2, 3), 4, max_tokens=1)
    desk.verdict((1, 2), 3, max_tokens=2)
    assert desk.want().max_tokens == 1


def test_refusals_say_what_is_wrong():
    desk = Desk()
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


def test_a_session_at_a_target_that_is_not_known_is_refused_until_it_is(caplog):
    """Membership may lag behind the router's, so the router is to try again; it is told nothing of what is known."""
    known = {TARGET}
    desk = Desk()
    desk.scheduler = DraftScheduler(LIMITS, known_targets=lambda: frozenset(known))
    assert [receiver for receiver, _ in desk.open("a")] == [TARGET]
    for attempt in (1, 2):
        ((receiver, refusal),) = desk.open("b", target_address="t2", attempt=attempt)
        assert isinstance(refusal, Refusal)
        assert (receiver, refusal.session, refusal.attempt) == (ROUTER, "b", attempt)
        assert refusal.reason is RefusalReason.OVERLOADED
    assert desk.scheduler.targets == {TARGET}
    assert desk.scheduler.refusals.counts == {"an Open that names no known target": 2}
    (logged,) = caplog.records
    assert "t2" in logged.getMessage()
    known.add("t2")
    assert [receiver for receiver, _ in desk.open("b", target_address="t2", attempt=3)] == ["t2"]


def test_a_target_that_is_listed_no_more_is_drafted_for_while_it_serves():
    known = {TARGET}
    desk = Desk()
    desk.scheduler = DraftScheduler(LIMITS, known_targets=lambda: frozenset(known))
    desk.open("a")
    known.clear()
    assert [receiver for receiver, _ in desk.open("a", attempt=2)] == [TARGET]
    desk.scheduler.receive(ROUTER, Close("a", 2), desk.now)
    assert [receiver for receiver, _ in desk.open("b")] == [ROUTER]


def test_an_older_open_and_a_foreign_close_change_nothing():
    desk = Desk()
    desk.open(attempt=2)
    assert desk.open(tokens=(9, 9), attempt=1) == []
    desk.scheduler.receive(ROUTER, Close("s", 1), desk.now)
    desk.scheduler.receive("other#1", Close("s", 9), desk.now)
    desk.scheduler.receive(ROUTER, Close("unknown", 9), desk.now)
    assert desk.want().tokens == (1, 2)


def test_a_broken_stream_to_the_target_stops_drafting_until_it_is_back():
    desk = Desk()
    desk.open()
    desk.scheduler.gone(TARGET)
    assert desk.wants(9) == []
    assert desk.scheduler.connected("t2") == []
    assert desk.scheduler.connected(TARGET) == [(TARGET, Attach("s", 2, hash_of(1, 2)))]
    assert desk.want().tokens == (1, 2)


def test_a_router_that_is_gone_or_does_not_list_a_session_frees_it():
    desk = Desk()
    desk.open("a")
    desk.open("b")
    desk.open("c", "other#1")
    desk.scheduler.receive("router#2", Hello("router", "", "", (LiveSession("a", 1),)), desk.now)
    assert desk.closed() == ["b"]
    desk.scheduler.gone(ROUTER)
    assert desk.closed() == [], "the old stream's end, heard late, is nothing to the new one"
    desk.scheduler.gone("router#2")
    assert desk.closed() == ["a"]
    assert desk.scheduler.targets == {TARGET}
    assert desk.scheduler.load() == {"sessions": 1.0}


def test_the_longest_unserved_session_comes_first():
    desk = Desk()
    for name in "abc":
        desk.open(name)
    assert [want.open.session for want in desk.wants(2)] == ["a", "b"]
    desk.verdict((1, 2), 7, session="a")
    assert [want.open.session for want in desk.wants(9)] == ["c", "a"]


# ---------------------------------------------------------------- drafting ahead


def under_verification(**changes: Any) -> Desk:
    """A session after (1, 2) whose block (5, 6) is out."""
    desk = Desk(draft_ahead=True)
    desk.open(**changes)
    desk.propose(desk.want(), 5, 6)
    return desk


def test_a_block_under_verification_is_drafted_ahead_for_once():
    desk = under_verification()
    want = desk.ahead()
    assert (want.tokens, want.prefix_hash) == ((1, 2), hash_of(1, 2))
    assert want.unverified == DraftTree.chain((5, 6))
    assert want.max_tokens >= want.open.draft_tokens, "the target has not asked for less"
    assert desk.wants_ahead(9) == []
    assert desk.wants(9) == []


def test_passes_are_counted_by_what_they_are_for_and_only_where_there_is_something_to_draft():
    desk = under_verification()
    assert (desk.scheduler.counts["passes"], desk.scheduler.counts["passes_ahead"]) == (1, 0)
    desk.ahead()
    assert desk.wants(9) == desk.wants_ahead(9) == []
    assert (desk.scheduler.counts["passes"], desk.scheduler.counts["passes_ahead"]) == (1, 1)


def test_what_is_drafted_for_each_outcome_is_sent_at_its_own_address():
    desk = under_verification()
    want = desk.ahead()
    outcomes = [(5, 6, 7), (5, 6, 8), (5, 9), (4,)]
    for outcome in outcomes:
        before = (1, 2, *outcome)
        block = Block("s", len(before), hash_of(*before), DraftTree.chain((3, 3)))
        assert desk.guess(want, outcome, 3, 3) == [(TARGET, block)]
    assert desk.scheduler.counts["guesses"] == 4
    assert desk.scheduler.counts["blocks"] == 5


@pytest.mark.parametrize("outcome", [(5, 6, 7), (5, 9), (4,)], ids=["all accepted", "one accepted", "none accepted"])
def test_a_right_guess_saves_the_next_draft_and_is_drafted_on_from(outcome):
    desk = under_verification()
    want = desk.ahead()
    for guess in [(5, 6, 7), (5, 9), (4,), (3,)]:
        desk.guess(want, guess, guess[-1] + 10, guess[-1] + 20)
    desk.verdict((1, 2), *outcome)
    assert desk.wants(9) == []
    assert not desk.scheduler.has_requests
    assert (desk.scheduler.counts["guess_hit"], desk.scheduler.counts["guess_miss"]) == (1, 0)
    further = desk.ahead()
    assert further.tokens == (1, 2, *outcome)
    assert further.unverified == DraftTree.chain((outcome[-1] + 10, outcome[-1] + 20))
    desk.verdict((1, 2, *outcome), 0)
    assert desk.want().tokens == (1, 2, *outcome, 0), "and after a miss a block is wanted as ever"


def test_wrong_guesses_are_forgotten_with_the_verdict_and_cost_nothing_else():
    desk = under_verification()
    want = desk.ahead()
    desk.guess(want, (5, 6, 7), 3)
    desk.guess(want, (4,), 3)
    desk.verdict((1, 2), 5, 6, 17)
    assert desk.scheduler.has_requests
    assert desk.want().tokens == (1, 2, 5, 6, 17)
    assert (desk.scheduler.counts["guess_hit"], desk.scheduler.counts["guess_miss"]) == (0, 1)
    desk.verdict((1, 2, 5, 6, 17), 3)
    assert desk.scheduler.counts["guess_miss"] == 1, "a session without guesses has missed none"


def test_of_a_guess_that_is_told_again_only_what_is_new_is_sent():
    desk = under_verification()
    want = desk.ahead()
    blocks = [(8,), (8,), (8, 9), (3, 9), (3, 9)]
    assert [len(desk.guess(want, (5, 6, 7), *block)) for block in blocks] == [1, 0, 1, 1, 0]
    desk.verdict((1, 2), 5, 6, 7)
    assert desk.ahead().unverified == DraftTree.chain((3, 9)), "the last that was sent"


def test_a_guess_for_other_tokens_of_the_same_length_is_no_hit():
    desk = under_verification()
    desk.guess(desk.ahead(), (5, 7), 3)
    desk.verdict((1, 2), 5, 8)
    assert desk.want().tokens == (1, 2, 5, 8)


def test_a_guess_that_is_drafted_while_its_verdict_arrives_is_sent_only_if_right():
    for bonus, sent in ((7, 1), (17, 0)):
        desk = under_verification()
        want = desk.ahead()
        desk.verdict((1, 2), 5, 6, bonus)
        assert len(desk.guess(want, (5, 6, 7), 8)) == sent
        assert len(desk.guess(want, (4,), 8)) == 0
        assert desk.scheduler.counts["guess_hit"] == sent
        assert len(desk.wants(9)) == 1 - sent


def test_a_right_guess_that_comes_after_a_block_was_wanted_is_not_sent_beside_it():
    """The target would drop the second as a duplicate; which of them comes first must not matter."""
    desk = under_verification()
    want = desk.ahead()
    desk.verdict((1, 2), 5, 6, 7)
    sure = desk.want()
    assert desk.guess(want, (5, 6, 7), 8) == []
    assert desk.propose(sure, 8, 9) == [(TARGET, Block("s", 5, hash_of(1, 2, 5, 6, 7), DraftTree.chain((8, 9))))]
    assert desk.ahead().unverified == DraftTree.chain((8, 9))


def going_on() -> Desk:
    """A session whose target has said that it goes on without a block."""
    desk = Desk(draft_ahead=True)
    desk.open()
    desk.propose(desk.want(), 9)
    desk.verdict((1, 2), 3, hold_step=False)
    return desk


def test_a_target_that_goes_on_gets_blocks_for_what_its_step_may_bring():
    desk = going_on()
    assert desk.wants(9) == []
    want = desk.ahead()
    assert (want.tokens, want.unverified) == ((1, 2, 3), NO_TREE)
    assert desk.guess(want, (4,), 5, 6) == [(TARGET, Block("s", 4, hash_of(1, 2, 3, 4), DraftTree.chain((5, 6))))]
    desk.verdict((1, 2, 3), 4, hold_step=False)
    assert desk.ahead().unverified == DraftTree.chain((5, 6)), "the guess was right: that block is being verified"


def test_a_block_for_what_was_guessed_late_is_sent_all_the_same():
    """The target went on, and what it decides next may be the block's first token."""
    desk = going_on()
    want = desk.ahead()
    desk.verdict((1, 2, 3), 4, hold_step=False)
    assert desk.guess(want, (4,), 5, 6) == [(TARGET, Block("s", 4, hash_of(1, 2, 3, 4), DraftTree.chain((5, 6))))]
    assert desk.guess(want, (8,), 5, 6) == []


def test_without_drafting_ahead_a_block_is_drafted_although_nobody_waits():
    desk = Desk(draft_ahead=False)
    desk.open()
    desk.propose(desk.want(), 9)
    desk.verdict((1, 2), 3, hold_step=False)
    assert desk.want().tokens == (1, 2, 3)


def test_drafting_ahead_is_vain_once_all_its_verdicts_are_in():
    desk = Desk(draft_ahead=True)
    for name in "ab":
        desk.open(name)
        desk.verdict((1, 2), 3, session=name, hold_step=False)
    assert desk.scheduler.is_ahead_vain
    assert len(desk.wants_ahead(9)) == 2
    desk.verdict((1, 2, 3), 4, session="a", hold_step=False)
    assert not desk.scheduler.is_ahead_vain
    desk.verdict((1, 2, 3), 4, session="b", hold_step=False)
    assert desk.scheduler.is_ahead_vain


def test_a_request_ahead_says_by_when_its_verdict_is_due():
    """By what earlier steps took, from their beginning: a verdict, or a block that was waited for."""
    desk = Desk(draft_ahead=True)
    desk.open()
    desk.propose(desk.want(), 9)
    desk.now = 0.5
    desk.verdict((1, 2), 3, hold_step=False)
    desk.now = 0.6
    desk.verdict((1, 2, 3), 4, hold_step=False)
    interval = StepIntervalEstimate().after(0.5).after(0.1)
    assert interval.least_s is not None
    assert desk.ahead().until == pytest.approx(0.6 + interval.least_s)


def test_of_a_target_that_is_new_nothing_is_known():
    desk = Desk(draft_ahead=True)
    desk.open()
    desk.verdict((1, 2), 3, hold_step=False)
    assert desk.ahead().until == math.inf


def test_requests_carry_what_a_token_must_be_worth():
    desk = Desk(draft_ahead=True)
    desk.open()
    desk.verdict((1, 2), 3, least_chance=0.25)
    assert desk.want().least_chance == 0.25
    desk.verdict((1, 2, 3), 4, least_chance=0.5, hold_step=False)
    assert desk.ahead().least_chance == 0.5


def test_the_draft_probs_of_a_block_that_was_drafted_ahead_go_with_it():
    desk = under_verification()
    desk.ahead()
    probs = SparseProbs(((7,), (8,)), ((1,), (2,)))
    ((_, block),) = desk.scheduler.proposed(
        [Proposal("s", 4, hash_of(1, 2, 5, 9), DraftTree.chain((7, 8), probs), (5, 9))], desk.now
    )
    assert isinstance(block, Block)
    assert block.tree.probs == probs


def test_a_guess_for_a_session_that_is_gone_or_without_tokens_is_no_block():
    desk = under_verification()
    want = desk.ahead()
    assert desk.guess(want, (4,)) == []
    desk.scheduler.receive(ROUTER, Close("s", 1), desk.now)
    assert desk.guess(want, (4,), 3) == []
    assert desk.scheduler.counts["nothing_to_propose"] == 2


def test_a_session_that_was_reopened_with_other_tokens_keeps_no_guess():
    desk = under_verification()
    want = desk.ahead()
    desk.guess(want, (5, 6, 7), 3)
    desk.open(tokens=(1, 2, 5, 6, 7), attempt=2)
    assert desk.want().tokens == (1, 2, 5, 6, 7), "what was sent under the old attempt may have been lost"


def test_nothing_is_drafted_ahead_past_the_end_or_when_switched_off():
    """A verdict brings one token at least, and one more than its block at the last position."""
    for max_len, wanted in ((4, 0), (5, 1)):
        desk = Desk(draft_ahead=True)
        desk.open(max_len=max_len)
        desk.propose(desk.want(), 5)
        assert len(desk.wants_ahead(9)) == wanted
    desk = Desk(draft_ahead=False)
    desk.open()
    desk.propose(desk.want(), 5, 6)
    assert desk.wants_ahead(9) == []


def test_drafting_ahead_takes_as_many_sessions_as_are_asked_for():
    desk = Desk(draft_ahead=True)
    for name in "abc":
        desk.open(name)
    for want in desk.wants(9):
        desk.propose(want, 5, 6)
    assert len(desk.wants_ahead(2)) == 2
    assert len(desk.wants_ahead(2)) == 1


def test_has_requests_says_whether_some_session_waits_for_a_block():
    desk = Desk(draft_ahead=True)
    assert not desk.scheduler.has_requests
    desk.open()
    assert desk.scheduler.has_requests
    desk.want()
    assert not desk.scheduler.has_requests
    desk.verdict((1, 2), 7)
    assert desk.scheduler.has_requests
    desk.scheduler.gone(TARGET)
    assert not desk.scheduler.has_requests
    desk.scheduler.connected(TARGET)
    assert desk.scheduler.has_requests
    desk.verdict((1, 2, 7), 0, finish=Finish.STOP)
    assert not desk.scheduler.has_requests


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_between_verdicts_no_address_gets_two_blocks_and_the_current_one_gets_one(verdicts, rng):
    """Whatever is guessed, early or late, and whatever the target decides."""
    desk = Desk(draft_ahead=True)
    desk.open(max_len=100)
    tokens: tuple[int, ...] = (1, 2)
    sent: set[tuple[int, int]] = set()
    late: list[tuple[Want, tuple[int, ...]]] = []

    def send(sends: list[Send]) -> None:
        for _, block in sends:
            assert isinstance(block, Block)
            assert (block.base_len, block.prefix_hash) not in sent
            sent.add((block.base_len, block.prefix_hash))

    for decided in verdicts:
        for want in desk.wants(9):
            send(desk.propose(want, rng.randrange(3), rng.randrange(3)))
        assert (len(tokens), hash_of(*tokens)) in sent
        for want in desk.wants_ahead(9):
            stop = rng.randrange(3)
            for token in rng.sample(range(3), 2):
                guess = (want, (*want.unverified.tokens[:stop], token))
                late.append(guess) if rng.random() < 0.3 else send(desk.guess(*guess, rng.randrange(3)))
        new = tuple(rng.randrange(3) for _ in range(decided % 3 + 1))
        desk.verdict(tokens, *new)
        tokens += new
        sent &= {(len(tokens), hash_of(*tokens))}
        while late:
            send(desk.guess(*late.pop(), 1))


def test_a_session_is_asked_for_no_shape_that_the_method_cannot_make():
    for shapes, asked in (({Shape.CHAIN}, Shape.CHAIN), (set(Shape), Shape.TREE)):
        desk = Desk(draft_ahead=True, shapes=frozenset(shapes))
        desk.open(max_len=90)
        desk.request((1, 2), shape=Shape.TREE)
        want = desk.want()
        assert want.request.shape is asked
        desk.propose(want, 5, 6)
        assert desk.ahead().request.shape is asked


def test_news_wait_for_a_pass_unless_a_session_is_over():
    """A method that is asked for nothing need not hear of every verdict, but may free what it holds."""
    desk = Desk()
    desk.open(asks=0)
    desk.verdict((1, 2), 3, max_tokens=0)
    assert desk.scheduler.next_pass(9, 9).is_empty
    desk.open("t", asks=4)
    assert desk.want().tokens == (1, 2)
    desk.verdict((1, 2, 3), 4, max_tokens=0, finish=Finish.STOP)
    over = desk.scheduler.next_pass(9, 9)
    assert over.news.closed == ("s",)
    assert not over.is_empty


# ---------------------------------------------------------------- back-pressure


def test_a_session_that_is_closed_is_detached_from_its_target():
    desk = Desk()
    desk.open()
    assert desk.scheduler.receive("router#2", Close("s", 1), desk.now) == []
    assert desk.scheduler.receive(ROUTER, Close("s", 1), desk.now) == [(TARGET, Detach("s"))]
    assert desk.scheduler.receive(ROUTER, Close("s", 1), desk.now) == []


def overtaken(desk: Desk, sessions: dict[str, tuple[int, ...]], rounds: int) -> list[Send]:
    """Verdicts overtake every block that is drafted; what the scheduler says until it says something."""
    for _ in range(rounds):
        wants = desk.wants(9)
        for want in wants:
            name = want.open.session
            desk.verdict(sessions[name], 1, session=name)
            sessions[name] += (1,)
        for want in wants:
            if sends := desk.propose(want, 5):
                return sends
    return []


def test_a_drafter_whose_blocks_are_all_overtaken_gives_up_a_session_and_takes_none_instead():
    desk = Desk()
    sessions: dict[str, tuple[int, ...]] = dict.fromkeys(("a", "b", "c"), (1, 2))
    for name in sessions:
        desk.open(name, max_len=90)
    refusal, detach = overtaken(desk, sessions, LEAST_WINDOW)
    assert isinstance(refusal[1], Refusal)
    gone = refusal[1].session
    assert (refusal[0], refusal[1].reason) == (ROUTER, RefusalReason.OVERLOADED)
    assert detach == (TARGET, Detach(gone))
    ((_, again),) = desk.open(gone)
    assert isinstance(again, Refusal)
    assert again.reason is RefusalReason.OVERLOADED
    assert desk.scheduler.load() == {"sessions": 2.0}


def test_a_session_of_which_nothing_is_asked_is_not_given_up_for_others():
    """It takes no time that they could have."""
    desk = Desk()
    sessions: dict[str, tuple[int, ...]] = dict.fromkeys(("b", "c"), (1, 2))
    for name in ("resting", *sessions):
        desk.open(name, asks=0 if name == "resting" else 4, max_len=90)
    (_, refusal), _ = overtaken(desk, sessions, LEAST_WINDOW)
    assert isinstance(refusal, Refusal)
    assert refusal.session in sessions


def test_a_session_whose_blocks_are_guessed_is_not_the_one_unserved_for_longest():
    desk = Desk(draft_ahead=True)
    desk.open("a", max_len=90)
    desk.open("b", max_len=90)
    first, second = desk.wants(9)
    desk.propose(first, 3)
    desk.propose(second, 3)
    ahead = next(want for want in desk.wants_ahead(9) if want.open.session == "a")
    desk.guess(ahead, (3, 4), 5)
    desk.verdict((1, 2), 3, 4, session="a")
    assert list(desk.scheduler._sessions.all) == ["b", "a"]


def test_a_drafter_that_was_still_for_long_gives_nobody_up():
    """Verdicts went on without it, many times; only blocks that it made and that came too late count."""
    desk = Desk()
    desk.open(max_len=90)
    desk.open("t", max_len=90)
    before = {"s": (1, 2), "t": (1, 2)}
    for index in range(LEAST_WINDOW):
        name = "st"[index % 2]
        if len(before[name]) < 80:
            assert desk.verdict(before[name], 1, session=name, answer=DraftAnswer.MISSED) == []
            before[name] += (1,)
    assert desk.scheduler.load() == {"sessions": 2.0}


def test_blocks_that_were_sent_and_came_too_late_count_too():
    desk = Desk()
    for name in ("s", "t"):
        desk.open(name, max_len=90)
    before = {"s": (1, 2), "t": (1, 2)}
    said = []
    while not said and len(before["s"]) < 80:
        for want in desk.wants(9):
            desk.propose(want, 5)
            name = want.open.session
            said += desk.verdict(before[name], 1, session=name, answer=DraftAnswer.MISSED)
            before[name] += (1,)
    assert [type(message) for _, message in said] == [Refusal, Detach]


# ---------------------------------------------------------------- the check at load


def checked(right: bool, confidence: float | None, rounds: int = 3) -> tuple[int, int]:
    """First tokens that the check has seen, and those of them that were accepted."""
    desk = Desk()
    text: tuple[int, ...] = (1, 2)
    desk.open(asks=2)
    for _ in range(rounds):
        want = desk.want()
        tree = DraftTree.chain((7 if right else 8, 9))
        proposal = Proposal("s", len(text), want.prefix_hash, tree, confidence=confidence)
        desk.scheduler.proposed([proposal], desk.now)
        desk.verdict(text, 7)
        text += (7,)
    return desk.scheduler.load_check.tokens, desk.scheduler.load_check.accepted


def test_what_the_target_decides_says_whether_first_tokens_were_right():
    assert checked(right=True, confidence=0.8) == (3, 3)
    assert checked(right=False, confidence=0.8) == (3, 0)


def test_a_method_that_estimates_no_chance_is_not_checked():
    assert checked(right=False, confidence=None) == (0, 0)


# ---------------------------------------------------------------- whose session it is


def test_a_session_is_not_replaced_by_another_routers_open():
    desk = Desk()
    desk.open()
    request = an_open("s", tokens=(5, 6), attempt=2, target_address="elsewhere")
    (send,) = desk.scheduler.receive("other#1", request, desk.now)
    assert send == ("other#1", Refusal("s", 2, RefusalReason.INVALID, "not permitted"))
    assert desk.scheduler.targets == {TARGET}, "and nobody is dialled for it"
    assert desk.scheduler.refusals.counts == {"an Open of another router's session": 1}


def test_attach_carries_the_assignment_token_of_the_open():
    desk = Desk()
    token = AssignmentToken(3, b"proof")
    assert desk.open(assignment_token=token) == [(TARGET, Attach("s", 2, hash_of(1, 2), None, token))]
    assert desk.scheduler.connected(TARGET) == [(TARGET, Attach("s", 2, hash_of(1, 2), None, token))]
