"""Tests a target replica's reports about its sessions."""

from dataclasses import replace

import pytest

from cluster.autoscaling import TargetReport
from cluster.costs import ForwardCost
from cluster.verification.scheduler import VerificationScheduler
from protos.messages import Detach, Verdict
from tests.scenarios.verification import DRAFTER, LIMITS, Target

PROMPT = (1, 2, 3)


def report(desk: Target, after: float = 0.0) -> TargetReport:
    desk.now += after
    return desk.scheduler.report(desk.now)


def test_drafted_and_undrafted_sessions_are_reported_separately() -> None:
    desk = Target(max_sessions=3)
    for name in "abcd":
        desk.open(name, tokens=PROMPT, max_len=20, draft_tokens=0 if name == "c" else 4)
    desk.attach(PROMPT, "a")
    told = report(desk)
    assert (told.running, told.queued, told.drafted, told.undrafted) == (3, 1, 1, 1)
    desk.scheduler.receive(DRAFTER, Detach("a"), desk.now)
    told = report(desk)
    assert (told.drafted, told.undrafted) == (0, 2), "a drafter that sheds a session leaves it wanting one"


def test_with_speculation_off_no_session_counts_as_undrafted() -> None:
    desk = Target(asked=0)
    desk.open(tokens=PROMPT, max_len=20)
    told = report(desk)
    assert (told.running, told.drafted, told.undrafted) == (1, 0, 0)


def test_audits_count_towards_no_need() -> None:
    desk = Target()
    desk.open(tokens=PROMPT, max_len=20, audit=True)
    told = report(desk)
    assert (told.running, told.unread, told.undrafted) == (0, 0, 0)


def test_time_to_first_token_includes_sessions_without_one() -> None:
    desk = Target(max_sessions=1)
    desk.open("a", tokens=PROMPT, max_len=20)
    desk.now = 2.0
    desk.open("b", tokens=PROMPT, max_len=20)
    desk.now = 4.0
    assert report(desk).first_token_s == 3.0, "a for four seconds so far, b for two"
    desk.step()
    told = report(desk, after=2.0)
    assert told.unread == 1
    assert told.first_token_s == 4.0, "a had its token after four seconds, b has waited for four"
    told = report(desk, after=1.0)
    assert told.first_token_s == 5.0, "a's was told before"
    desk.step()
    assert report(desk).first_token_s == 5.0, "further tokens are no first ones"


def test_waiting_and_cache_are_reported_as_recent_shares() -> None:
    desk = Target()
    desk.open(tokens=PROMPT, max_len=20)
    desk.now = 0.3
    desk.step()  # takes 0.1 s; could have begun 0.3 s earlier
    told = report(desk)
    assert told.waiting == pytest.approx(0.75)
    assert told.cache == pytest.approx(0.01), "one page of a hundred"
    assert report(desk).waiting == 0.0, "nothing has happened since"


def test_the_backlog_is_the_remaining_time_of_prompts() -> None:
    """The profiled cost is 10 ms per token."""
    scheduler = VerificationScheduler(
        replace(LIMITS, max_sessions=1, max_step_tokens=2), step_cost=ForwardCost.linear(0.0, per_token_s=0.01)
    )
    desk = Target()
    desk.scheduler = scheduler
    for name in "ab":
        desk.open(name, tokens=PROMPT, max_len=20)
    assert report(desk).backlog_s == pytest.approx(0.06)


def test_an_undrafted_session_keeps_wanting_drafts() -> None:
    """This uses the real policy; otherwise a pool without drafters would never recover."""
    desk = Target(pages=100)
    desk.scheduler = VerificationScheduler(replace(LIMITS, max_context=2000, pages=600))
    desk.limits = replace(LIMITS, max_context=2000, pages=600)
    desk.open(tokens=PROMPT, max_len=600)
    for _ in range(500):
        desk.now += 0.1
        desk.step()
        assert report(desk).undrafted == 1


def test_cached_prompts_are_counted_except_in_audits() -> None:
    desk = Target()
    page = desk.limits.page_size
    prompt = tuple(range(1, page + 2))
    for name, is_audit in (("a", False), ("b", False), ("c", True)):
        desk.open(name, tokens=prompt, max_len=len(prompt) + 1, audit=is_audit)
        desk.finish()
    activity = desk.scheduler.reporter.activity()
    assert (activity.prefix_tokens, activity.prefix_hits) == (2 * len(prompt), page)
    assert (activity.running, activity.queued, activity.cache) == (0, 0, 0.0)


def test_draft_lengths_and_block_delays_are_counted() -> None:
    desk = Target(patience=10.0, hold=10.0, asked=2)
    desk.open(tokens=PROMPT, max_len=20)
    desk.attach(PROMPT)
    desk.now = 1.0
    desk.block(PROMPT, (4, 5))  # not timed, because the drafter had to read the prompt
    decided = next(message.tokens for _, message in desk.step() if isinstance(message, Verdict))
    desk.now = 2.5
    desk.block((*PROMPT, *decided), (4, 5))
    activity = desk.scheduler.reporter.activity()
    assert (activity.blocks_timed, activity.block_delay_s) == (1, 1.5)
    assert activity.running == 1
    assert activity.cache > 0
    before = activity.chosen[2]
    desk.step()
    assert desk.scheduler.reporter.activity().chosen[2] == before + 1
