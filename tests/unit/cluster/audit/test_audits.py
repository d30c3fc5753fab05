"""Tests a router's audits: selection of requests, queue, choice of targets, interruptions and results."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.audit import Audits, Difference, is_chosen
from cluster.config import AuditConfig
from cluster.routing.ledger import Generation, Session
from cluster.routing.session_router import Peers
from protos.messages import Acceptance, Close, Finish, Open, Refusal, RefusalReason, Sampling, Verdict
from protos.prefix import Prefix
from tests.unit.cluster.samples import GREEDY, KEY

PROMPT = (1, 2, 3)
TEXT = (10, 11, 12)


def an_ended(name: str, committed: tuple[int, ...] = TEXT, **changes: Any) -> Session:
    session = Session(
        replace(Generation(name, PROMPT, 99, (0,), GREEDY, 7, 8, 0, KEY, Acceptance.COUPLED, 4), **changes)
    )
    session.assign_target("T")
    if committed:
        here = Prefix(KEY, PROMPT)
        session.on_verdict("T", Verdict(name, 1, 3, here.hash, committed, 0, 0))
    return session


class AuditHarness:
    """Router's audits with its reachable targets."""

    def __init__(self, targets: str = "TU", numerics: str = "fast", **config: Any) -> None:
        self.found: list[Difference] = []
        self.audits = Audits(AuditConfig(**{"share": 1.0, **config}), "float32", self.found.append, numerics)
        self.targets = Peers("router")
        self.now = 0.0
        for address in targets:
            self.targets.up(address)

    def ended(self, name: str = "s", served_by: str = "T", **changes: Any) -> None:
        self.audits.ended(an_ended(name, **changes), frozenset(served_by))

    def tick(self, seconds: float = 0.0) -> list[tuple[str, Open]]:
        self.now += seconds
        return self.audits.tick(self.targets, self.now)  # type: ignore[return-value]

    def begin(self, **changes: Any) -> tuple[str, Open]:
        self.ended(**changes)
        (sent,) = self.tick()
        return sent

    def say(self, target: str, request: Open, *tokens: int, margin: float | None = None) -> list[Any]:
        finish = Finish.LENGTH if len(request.tokens) + len(tokens) == request.max_len else Finish.NONE
        here = Prefix(KEY, request.tokens)
        verdict = Verdict(request.session, request.attempt, len(here), here.hash, tokens, 0, 0, finish, margin=margin)
        return self.audits.receive(target, verdict, self.now)

    def refuse(self, target: str, request: Open, reason: RefusalReason = RefusalReason.OVERLOADED) -> None:
        assert not self.audits.receive(target, Refusal(request.session, request.attempt, reason, "no"), self.now)

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: count for outcome, count in self.audits.counts.items() if count}


# ---------------------------------------------------------------- selection


def test_about_the_share_is_chosen_and_a_session_always_or_never():
    names = [f"session-{index}" for index in range(20_000)]
    chosen = [name for name in names if is_chosen(name, 0.05)]
    assert 850 < len(chosen) < 1150  # five standard deviations
    assert chosen == [name for name in chosen if is_chosen(name, 0.1)]
    assert not any(is_chosen(name, 0.0) for name in names)
    assert all(is_chosen(name, 1.0) for name in names)


def test_by_default_nothing_is_audited():
    audits = Audits(AuditConfig(), "bfloat16", lambda _: None)
    audits.ended(an_ended("s"), frozenset("T"))
    assert (audits.waiting, audits.state) == (0, "off")
    assert set(audits.counts.values()) == {0}
    assert audits.counts.keys() >= {"equal", "differs"}, "exported from the beginning"


def test_rejection_sampling_is_counted_and_not_audited():
    harness = AuditHarness()
    harness.ended(sampling=Sampling(temperature=0.7), acceptance=Acceptance.REJECTION)
    assert (harness.outcomes, harness.tick()) == ({"rejection": 1}, [])


def test_a_request_without_tokens_is_not_audited():
    harness = AuditHarness()
    harness.ended(committed=())
    assert (harness.outcomes, harness.audits.waiting) == ({}, 0)


# ---------------------------------------------------------------- queue


def test_requests_beyond_the_queue_are_dropped_and_counted():
    harness = AuditHarness(max_waiting=2)
    for name in "abc":
        harness.ended(name)
    assert (harness.audits.waiting, harness.outcomes) == (2, {"dropped": 1})


def test_waiting_tokens_are_bounded():
    harness = AuditHarness(max_waiting_tokens=14)
    harness.ended("a")
    harness.ended("b", committed=tuple(range(10, 16)))
    harness.ended("c", committed=tuple(range(10, 15)))
    assert (harness.audits.waiting, harness.outcomes) == (2, {"dropped": 1})


def test_one_audit_runs_at_a_time():
    harness = AuditHarness()
    harness.begin(name="a")
    harness.ended("b")
    assert harness.tick(10.0) == []


# ---------------------------------------------------------------- targets


def test_another_target_than_the_one_that_served_is_preferred():
    assert [AuditHarness(targets).begin()[0] for targets in ("TU", "UT", "T")] == ["U", "U", "T"]


def test_an_audit_waits_for_another_target_and_lets_others_pass():
    harness = AuditHarness()
    harness.targets.moved(None, "U")
    harness.ended("a", served_by="T")
    assert harness.tick() == []
    harness.ended("b", served_by="U")
    ((target, request),) = harness.tick()
    assert (target, request.session) == ("T", "audit-b"), "it does not block the queue"
    harness.say(target, request, *TEXT)
    harness.targets.moved("U", None)
    ((target, request),) = harness.tick()
    assert (target, request.session) == ("U", "audit-a")


def test_targets_with_sessions_are_not_used():
    harness = AuditHarness("T")
    harness.targets.moved(None, "T")
    harness.ended()
    assert harness.tick(99.0) == []


def test_a_refused_audit_continues_after_a_pause_before_any_other():
    harness = AuditHarness("T")
    target, request = harness.begin(name="a")
    harness.ended("b")
    harness.say(target, request, 10)
    harness.refuse(target, request)
    assert harness.tick() == [], "requests are being served"
    ((_, again),) = harness.tick(10.0)
    assert (again.session, again.tokens, again.attempt) == ("audit-a", (*PROMPT, 10), 2)
    harness.say(target, again, 11, 12)
    assert harness.outcomes == {"equal": 1}


def test_a_refusal_of_an_earlier_attempt_is_ignored():
    harness = AuditHarness("T")
    target, request = harness.begin()
    (sent,) = harness.say(target, request, 50)
    harness.refuse(target, request)
    assert harness.say(target, sent[1], 50, margin=3.0), "it still runs"


def test_an_audit_refused_as_invalid_fails():
    harness = AuditHarness("T")
    target, request = harness.begin()
    harness.refuse(target, request, RefusalReason.INVALID)
    assert (harness.tick(99.0), harness.outcomes) == ([], {"failed": 1})


@pytest.mark.parametrize("malformed", [False, True])
def test_an_audit_that_loses_its_targets_is_given_up_after_a_few(malformed):
    harness = AuditHarness("T")
    target, request = harness.begin()
    lost = 0
    while True:
        lost += 1
        assert lost < 10
        if malformed:
            close = Close(request.session, request.attempt)
            assert harness.audits.unreadable(target, request.session) == [(target, close)]
        else:
            harness.audits.gone(target)
        if not (sent := harness.tick(99.0)):
            break
        ((target, request),) = sent
    assert lost > 1
    assert harness.outcomes == {"failed": 1}


def test_other_targets_and_sessions_are_ignored():
    harness = AuditHarness()
    target, request = harness.begin()
    harness.audits.gone("T")
    assert harness.say("T", request, *TEXT) == []
    assert harness.audits.unreadable(target, "another") == []
    harness.say(target, request, *TEXT)
    assert harness.outcomes == {"equal": 1}


def test_a_stopped_router_ends_all_audits():
    harness = AuditHarness()
    target, request = harness.begin(name="a")
    harness.ended("b")
    assert harness.audits.stop() == [(target, Close("audit-a", request.attempt))]
    assert (harness.tick(99.0), harness.outcomes) == ([], {"dropped": 2})
    assert harness.audits.stop() == []


# ---------------------------------------------------------------- results


def a_difference(harness: AuditHarness, margin: float) -> tuple[str, list[Any]]:
    """Runs an audit until the answer with its margin."""
    target, request = harness.begin()
    ((_, question),) = harness.say(target, request, 10, 50)
    return target, harness.say(target, question, 50, margin=margin)


def test_a_difference_is_counted_and_alarmed():
    harness = AuditHarness()
    target, sent = a_difference(harness, 3.0)
    assert harness.found == []
    assert harness.say(target, sent[0][1], 51) == []
    assert [(found.plain, found.committed, found.audited_by) for found in harness.found] == [((50, 51), (11, 12), "U")]
    assert (harness.outcomes, harness.audits.state) == ({"differs": 1}, "differs")


def test_the_near_tie_margin_follows_dtype_and_numerics_unless_configured():
    for config, margin, outcome in (
        ({}, 0.001, "near_tie"),
        ({}, 0.003, "differs"),
        ({"near_tie": 0.01}, 0.003, "near_tie"),
        ({"numerics": "invariant"}, 1e-6, "differs"),
        ({"numerics": "invariant", "near_tie": 0.01}, 0.003, "near_tie"),
    ):
        harness = AuditHarness(**config)
        target, sent = a_difference(harness, margin)
        harness.say(target, sent[0][1], 51 if outcome == "differs" else 12)
        assert harness.outcomes == {outcome: 1}
        assert (harness.audits.widest_near_tie == margin) == (outcome == "near_tie")


@pytest.mark.parametrize("how", ["stopped", "lost"])
def test_a_difference_is_reported_without_its_continuation(how):
    harness = AuditHarness("T")
    target, _ = a_difference(harness, 3.0)
    if how == "stopped":
        harness.audits.stop()
    for _ in range(10 if how == "lost" else 0):
        harness.audits.gone(target)
        harness.tick()
    assert [found.plain for found in harness.found] == [(50,)]
    assert harness.outcomes == {"differs": 1}
