"""Tests a target replica's reports about its sessions."""

from dataclasses import replace

import pytest

from cluster.autoscaling import TargetReport
from cluster.costs import ForwardCost
from cluster.verification.scheduler import VerificationScheduler
from protos.messages import Detach, Verdict
from tests.scenarios.verification import DRAFTER, LIMITS, Target

PROMPT = (1, 2, 3)


def report(harness: Target, after: float = 0.0) -> TargetReport:
    harness.now += after
    return harness.scheduler.report(harness.now)


def test_drafted_and_undrafted_sessions_are_reported_separately() -> None:
    harness = Target(max_sessions=3)
    for name in "abcd":
        harness.open(name, tokens=PROMPT, max_len=20, draft_tokens=0 if name == "c" else 4)
    harness.attach(PROMPT, "a")
    reported = report(harness)
    assert (reported.running, reported.queued, reported.drafted, reported.undrafted) == (3, 1, 1, 1)
    harness.scheduler.receive(DRAFTER, Detach("a"), harness.now)
    reported = report(harness)
    assert (reported.drafted, reported.undrafted) == (0, 2), "a drafter that sheds a session leaves it wanting one"


def test_with_speculation_off_no_session_counts_as_undrafted() -> None:
    harness = Target(asked=0)
    harness.open(tokens=PROMPT, max_len=20)
    reported = report(harness)
    assert (reported.running, reported.drafted, reported.undrafted) == (1, 0, 0)


def test_audits_count_towards_no_need() -> None:
    harness = Target()
    harness.open(tokens=PROMPT, max_len=20, audit=True)
    reported = report(harness)
    assert (reported.running, reported.unread, reported.undrafted) == (0, 0, 0)


def test_time_to_first_token_includes_sessions_without_one() -> None:
    harness = Target(max_sessions=1)
    harness.open("a", tokens=PROMPT, max_len=20)
    harness.now = 2.0
    harness.open("b", tokens=PROMPT, max_len=20)
    harness.now = 4.0
    assert report(harness).first_token_s == 3.0, "a for four seconds so far, b for two"
    harness.step()
    reported = report(harness, after=2.0)
    assert reported.unread == 1
    assert reported.first_token_s == 4.0, "a had its token after four seconds, b has waited for four"
    reported = report(harness, after=1.0)
    assert reported.first_token_s == 5.0, "a's was told before"
    harness.step()
    assert report(harness).first_token_s == 5.0, "further tokens are no first ones"


def test_waiting_and_cache_are_reported_as_recent_shares() -> None:
    harness = Target()
    harness.open(tokens=PROMPT, max_len=20)
    harness.now = 0.3
    harness.step()  # takes 0.1 s; could have begun 0.3 s earlier
    reported = report(harness)
    assert reported.waiting == pytest.approx(0.75)
    assert reported.cache == pytest.approx(0.01), "one page of a hundred"
    assert report(harness).waiting == 0.0, "nothing has happened since"


def test_the_backlog_is_the_remaining_time_of_prompts() -> None:
    """The profiled cost is 10 ms per token."""
    scheduler = VerificationScheduler(
        replace(LIMITS, max_sessions=1, max_step_tokens=2), step_cost=ForwardCost.linear(0.0, per_token_s=0.01)
    )
    harness = Target()
    harness.scheduler = scheduler
    for name in "ab":
        harness.open(name, tokens=PROMPT, max_len=20)
    assert report(harness).backlog_s == pytest.approx(0.06)


def test_an_undrafted_session_keeps_requesting_drafts() -> None:
    """This uses the real policy; otherwise a pool without drafters would never recover."""
    harness = Target(pages=100)
    harness.scheduler = VerificationScheduler(replace(LIMITS, max_context=2000, pages=600))
    harness.limits = replace(LIMITS, max_context=2000, pages=600)
    harness.open(tokens=PROMPT, max_len=600)
    for _ in range(500):
        harness.now += 0.1
        harness.step()
        assert report(harness).undrafted == 1


def test_cached_prompts_are_counted_except_in_audits() -> None:
    harness = Target()
    page = harness.limits.page_size
    prompt = tuple(range(1, page + 2))
    for name, is_audit in (("a", False), ("b", False), ("c", True)):
        harness.open(name, tokens=prompt, max_len=len(prompt) + 1, audit=is_audit)
        harness.finish()
    activity = harness.scheduler.reporter.activity()
    assert (activity.prefix_tokens, activity.prefix_hits) == (2 * len(prompt), page)
    assert (activity.running, activity.queued, activity.cache) == (0, 0, 0.0)


def test_draft_lengths_and_block_delays_are_counted() -> None:
    harness = Target(patience=10.0, hold=10.0, asked=2)
    harness.open(tokens=PROMPT, max_len=20)
    harness.attach(PROMPT)
    harness.now = 1.0
    harness.block(PROMPT, (4, 5))  # not timed, because the drafter had to read the prompt
    decided = next(message.tokens for _, message in harness.step() if isinstance(message, Verdict))
    harness.now = 2.5
    harness.block((*PROMPT, *decided), (4, 5))
    activity = harness.scheduler.reporter.activity()
    assert (activity.blocks_timed, activity.block_delay_s) == (1, 1.5)
    assert activity.running == 1
    assert activity.cache > 0
    before = activity.chosen[2]
    harness.step()
    assert harness.scheduler.reporter.activity().chosen[2] == before + 1
