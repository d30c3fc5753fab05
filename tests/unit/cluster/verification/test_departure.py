"""A target that leaves as planned takes nothing more, tells routers, and in the end gives back what they left it."""

from cluster.verification.admission import LEAVES
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from cluster.verification.step import Outcome
from protos.messages import Close, Leaving, Refusal, RefusalReason, Verdict
from tests.unit.cluster.samples import an_open

LIMITS = VerificationLimits(50, max_context=100, max_sessions=1, max_step_tokens=64, pages=100, page_size=4)
HERE = "router#1"
THERE = "other#1"


def refusal(session: str, attempt: int = 1) -> Refusal:
    return Refusal(session, attempt, RefusalReason.OVERLOADED, LEAVES)


def serving() -> VerificationScheduler:
    """Two sessions of one router, of which one waits for its place, and one of another."""
    scheduler = VerificationScheduler(LIMITS)
    for router, session in ((HERE, "a"), (HERE, "b"), (THERE, "c")):
        assert scheduler.receive(router, an_open(session), 0.0) == []
    return scheduler


def step(scheduler: VerificationScheduler, now: float) -> list[tuple[str, object]]:
    plan = scheduler.plan(now)
    assert plan is not None
    outcomes = [Outcome(row.session, (), 9) for row in plan.rows if row.decide]
    return [(to, message) for to, message in scheduler.apply(outcomes, 0.1, now + 0.1)]


def test_each_router_that_has_sessions_hears_once_that_it_leaves():
    assert serving().departure.begin() == [(HERE, Leaving()), (THERE, Leaving())]


def test_a_session_that_comes_too_late_is_no_failure():
    scheduler = serving()
    scheduler.departure.begin()
    assert scheduler.receive("third#1", an_open("d"), 0.0) == [("third#1", refusal("d")), ("third#1", Leaving())]


def test_what_runs_goes_on_until_routers_take_it_away():
    scheduler = serving()
    scheduler.departure.begin()
    ((to, verdict),) = step(scheduler, 1.0)
    assert isinstance(verdict, Verdict)
    assert (to, verdict.session, verdict.tokens) == (HERE, "a", (9,))
    for router, session in ((HERE, "a"), (HERE, "b")):
        scheduler.receive(router, Close(session, 1), 2.0)
        assert not scheduler.departure.is_complete
    scheduler.receive(THERE, Close("c", 1), 2.0)
    assert scheduler.departure.is_complete


def test_one_that_does_not_leave_is_never_done_with_it():
    assert not VerificationScheduler(LIMITS).departure.is_complete


def test_in_the_end_it_gives_back_what_is_left_also_in_mid_step():
    scheduler = serving()
    scheduler.departure.begin()
    plan = scheduler.plan(1.0)
    assert plan is not None
    assert scheduler.departure.end() == [(HERE, refusal("a")), (HERE, refusal("b")), (THERE, refusal("c"))]
    assert scheduler.apply([Outcome("a", (), 9)], 0.1, 1.1) == []
    assert step(scheduler, 2.0) == []  # the engine hears that it is closed
    assert scheduler.is_idle


def test_audits_are_given_back_at_once():
    scheduler = VerificationScheduler(LIMITS)
    scheduler.receive(HERE, an_open("a", audit=True), 0.0)
    assert scheduler.departure.begin() == [(HERE, refusal("a"))]
    assert scheduler.departure.is_complete
