"""A session at a target belongs to the router that opened it, and takes drafts of the drafter it was assigned to."""

from dataclasses import replace

import pytest

from cluster.envelope import Send
from cluster.trust import issue
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from protos.messages import (
    AssignmentToken,
    Attach,
    Close,
    Detach,
    DraftRequest,
    Hello,
    LiveSession,
    NoDraft,
    Open,
    Refusal,
    RefusalReason,
    Resync,
)
from protos.prefix import Prefix
from tests.unit.cluster.samples import KEY, a_block, an_open

LIMITS = VerificationLimits(50, max_context=100, max_sessions=4, max_step_tokens=64, pages=100, page_size=4)
ROUTER = "router#1"
DRAFTER = "drafter#1"
SECRET = b"secret"
HASH = Prefix(KEY, (1, 2)).hash
FIRST = issue(SECRET, "s", 1)
FORGED = {
    "none": None,
    "of another session": issue(SECRET, "t", 1),
    "of another key": issue(b"guess", "s", 1),
    "with another number": replace(FIRST, assignment=2),
    "of nothing": AssignmentToken(0, bytes(16)),
}


def opened(**changes: object) -> VerificationScheduler:
    scheduler = VerificationScheduler(LIMITS)
    scheduler.receive(ROUTER, an_open(**{"tokens": (1, 2), "token_key": SECRET} | changes), 0.0)
    return scheduler


def attach(scheduler: VerificationScheduler, token: AssignmentToken | None, drafter: str = DRAFTER) -> list[Send]:
    return scheduler.receive(drafter, Attach("s", 2, HASH, None, token), 0.0)


def is_attached(sends: list[Send]) -> bool:
    return any(isinstance(message, DraftRequest) for _, message in sends)


def drafter_of(scheduler: VerificationScheduler) -> str | None:
    session = scheduler._admission.find("s")
    assert session is not None
    return session.drafter


# ---------------------------------------------------------------- routers


def test_a_session_is_not_replaced_by_another_routers_open():
    scheduler = opened()
    (send,) = scheduler.receive("other#1", an_open(tokens=(5, 6), attempt=2), 0.0)
    assert send == ("other#1", Refusal("s", 2, RefusalReason.INVALID, "not permitted"))
    session = scheduler._admission.find("s")
    assert session is not None
    assert (session.router, session.open.tokens) == (ROUTER, (1, 2))
    assert scheduler.refusals.counts == {"an Open of another router's session": 1}


def test_nor_does_what_is_wrong_with_it_say_more():
    (send,) = opened().receive("other#1", an_open(tokens=(99, 2), attempt=1), 0.0)
    assert send == ("other#1", Refusal("s", 1, RefusalReason.INVALID, "not permitted"))


def test_its_own_router_replaces_it_also_from_a_new_stream():
    scheduler = opened()
    assert scheduler.receive(ROUTER, an_open(tokens=(5, 6), attempt=2), 0.0) == []
    scheduler.receive("router#2", Hello("router", "v", "m", (LiveSession("s", 2),)), 0.0)
    assert scheduler.receive("router#2", an_open(tokens=(7, 8), attempt=3), 0.0) == []
    session = scheduler._admission.find("s")
    assert session is not None
    assert session.open.tokens == (7, 8)


def test_another_router_neither_closes_nor_claims_it():
    scheduler = opened()
    scheduler.receive("other#1", Close("s", 9), 0.0)
    scheduler.receive("other#1", Hello("other", "v", "m", (LiveSession("s", 1),)), 0.0)
    session = scheduler._admission.find("s")
    assert session is not None
    assert session.router == ROUTER


# ---------------------------------------------------------------- drafters


def test_the_drafter_that_it_was_assigned_to_attaches():
    scheduler = opened()
    assert is_attached(attach(scheduler, FIRST))
    assert drafter_of(scheduler) == DRAFTER


@pytest.mark.parametrize("token", FORGED.values(), ids=FORGED)
def test_others_are_told_nothing_and_get_no_verdict(token):
    scheduler = opened()
    assert attach(scheduler, token, "thief#1") == []
    wrong_hash = Attach("s", 1, 7, None, token)
    assert scheduler.receive("thief#1", wrong_hash, 0.0) == [], "a Resync would tell length and hash"
    assert drafter_of(scheduler) is None
    assert scheduler.refusals.counts == {"an Attach to a session that it was not assigned": 2}


def test_its_own_drafter_is_told_that_its_tokens_are_wrong():
    (send,) = opened().receive(DRAFTER, Attach("s", 1, 7, None, FIRST), 0.0)
    assert send == (DRAFTER, Resync("s", 2, HASH))


def test_a_later_drafter_shuts_out_those_before_it():
    scheduler = opened()
    attach(scheduler, FIRST)
    assert is_attached(attach(scheduler, issue(SECRET, "s", 2), "second#1"))
    assert attach(scheduler, FIRST) == []
    assert drafter_of(scheduler) == "second#1"


def test_a_drafter_may_come_again_by_another_stream():
    scheduler = opened()
    attach(scheduler, FIRST)
    scheduler.gone(DRAFTER, 0.0)
    assert is_attached(attach(scheduler, FIRST, "drafter#2"))


def test_blocks_are_the_attached_drafters_alone():
    scheduler = opened()
    attach(scheduler, FIRST)
    scheduler.receive("thief#1", a_block((1, 2), (5,)), 0.0)
    scheduler.receive("thief#1", NoDraft("s", 2, HASH), 0.0)
    session = scheduler._admission.find("s")
    assert session is not None
    assert session.ready_block() is None
    assert not session.has_no_draft
    assert +scheduler.counts.dropped == {"not_assigned": 1}
    scheduler.receive(DRAFTER, a_block((1, 2), (5,)), 0.0)
    assert session.ready_block() is not None
    scheduler.receive(DRAFTER, NoDraft("s", 2, HASH), 0.0)
    assert session.has_no_draft


def test_a_block_of_an_earlier_drafter_is_late_and_no_strangers():
    """Nor after the router has opened the session anew: what is counted as refused raises an alarm."""
    scheduler = opened()
    attach(scheduler, FIRST)
    attach(scheduler, issue(SECRET, "s", 2), "second#1")
    scheduler.receive(DRAFTER, a_block((1, 2), (5,)), 0.0)
    scheduler.receive(ROUTER, an_open(tokens=(1, 2), attempt=2, token_key=SECRET), 0.0)
    scheduler.receive(DRAFTER, a_block((1, 2), (5,)), 0.0)
    scheduler.receive("second#1", a_block((1, 2), (5,)), 0.0)
    assert +scheduler.counts.dropped == {"not_assigned": 3}
    assert scheduler.refusals.counts == {}
    scheduler.receive("thief#1", a_block((1, 2), (5,)), 0.0)
    assert scheduler.refusals.counts == {"a Block for a session that it was not assigned": 1}


def test_a_stranger_detaches_nobody():
    scheduler = opened()
    attach(scheduler, FIRST)
    scheduler.receive("thief#1", Detach("s"), 0.0)
    assert drafter_of(scheduler) == DRAFTER


def test_attach_before_open_needs_an_assignment_token():
    """Holds in any order, even though both wait for it."""
    for order in (("thief#1", DRAFTER), (DRAFTER, "thief#1")):
        scheduler = VerificationScheduler(LIMITS)
        for drafter in order:
            attach(scheduler, FIRST if drafter == DRAFTER else None, drafter)
            scheduler.receive(drafter, a_block((1, 2), (5,) if drafter == DRAFTER else (6,)), 0.0)
        sends = scheduler.receive(ROUTER, an_open(tokens=(1, 2), token_key=SECRET), 0.0)
        assert {receiver for receiver, _ in sends} == {DRAFTER}
        session = scheduler._admission.find("s")
        assert session is not None
        block = session.ready_block()
        assert block is not None
        assert block.tree.tokens == (5,)
        assert +scheduler.counts.dropped == {"not_assigned": 1}


def test_nobody_drafts_for_an_audit():
    scheduler = opened(audit=True, draft_tokens=0, token_key=b"")
    assert attach(scheduler, None) == []


def test_an_open_without_a_key_takes_any_drafter():
    request: Open = an_open(tokens=(1, 2))
    scheduler = VerificationScheduler(LIMITS)
    scheduler.receive(ROUTER, request, 0.0)
    assert is_attached(attach(scheduler, None))
