"""Tests the controller's decisions over many rounds of steps and blocks."""

from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.costs import ForwardCost
from cluster.speculation.controller import Adaptive, SpeculationController, StepShape
from cluster.speculation.estimators import SessionStats
from tests.unit.cluster.speculation.samples import a_yield

PROFILE = ForwardCost.linear(0.099, per_token_s=0.001)


def a_pacer(token_s: float = 0.005, base_s: float = 0.01) -> SpeculationController:
    """Returns the controller of a replica with ten tokens per second and this block delay."""
    pacer = SpeculationController(Adaptive(), PROFILE)
    for tokens in (1, 4) * 20:
        pacer.block_arrived(tokens, base_s + tokens * token_s)
    return pacer


def rejected(pacer: SpeculationController, sessions: int = 1) -> list[SessionStats]:
    """Returns sessions with only rejected blocks."""
    found = [SessionStats(delay_s=0.03, hits=0.1) for _ in range(sessions)]
    for stats in found:
        for _ in range(40):
            stats.block_verified(2, 2, range(0))
            pacer.block_verified(2, 2, 2, range(0))
    return found


@pytest.mark.parametrize("count", [1, 50])
def test_unprofitable_drafts_are_tried_in_few_steps_at_any_number_of_sessions(count):
    """All sessions pay for a trial."""
    pacer = a_pacer()
    sessions = rejected(pacer, count)
    steps = 5000
    asked = sum(pacer.decide(sessions[index % count], 2, count).tokens > 0 for index in range(steps * count))
    assert 0.005 * steps < asked < 0.015 * steps


def test_drafting_resumes_when_it_pays_again():
    """A trial continues while the target accepts its tokens, until the evidence suffices."""
    pacer = a_pacer()
    [stats] = rejected(pacer)
    assert pacer.decide(stats, 2, 1).tokens == 0
    rounds = 0
    while stats.is_disabled:
        decision = pacer.decide(stats, 2, 1)
        if decision.tokens:
            stats.block_verified(decision.tokens, decision.tokens, range(decision.tokens))
        rounds += 1
        assert rounds < 500
    assert pacer.decide(stats, 2, 1).tokens >= 1


def test_a_session_whose_blocks_are_not_waited_for_waits_once_at_long_regular_intervals():
    """Otherwise blocks that were slow once would count as slow forever. Other sessions wait too."""
    pacer = a_pacer(base_s=0.3)
    stats = a_yield(0.5, 0.25)
    waited = [index for index in range(1000) if pacer.decide(stats, 2, 1).hold_step]
    intervals = {later - earlier for earlier, later in pairwise([-1, *waited])}
    assert len(intervals) == 1
    assert 32 < intervals.pop() < 300


def test_steps_that_feed_prompts_leave_the_rate_unchanged():
    pacer = a_pacer()
    step = StepShape(rows=1, tokens=1, decoding=1)
    pacer.record_step(replace(step, prompts=1, prompt_tokens=8, tokens=9), 1, 5.0, took_s=5.0)
    assert pacer.load.non_speculative_rate == 10.0
    pacer.record_step(step, 1, 0.2, took_s=0.2)
    assert pacer.load.non_speculative_rate < 10.0


DECODES = StepShape(rows=4, tokens=4, decoding=4, is_open_to_drafts=True)
FEEDS = replace(DECODES, rows=5, tokens=34, prompts=1, prompt_tokens=30)


def share_on(
    non_speculative_s: dict[StepShape, float], drafted_s: dict[StepShape, float], committed: int, steps: int
) -> float:
    """Returns the final share of steps with requested drafts, given step times with and without them."""
    pacer = a_pacer()
    stats = SessionStats()
    asked = [False]
    for index in range(steps):
        step = FEEDS if index % 4 == 0 else DECODES
        is_on = asked[-1]
        seconds = drafted_s[step] if is_on else non_speculative_s[step]
        pacer.record_step(replace(step, is_drafted_for=is_on), committed if is_on else 4, 0.1, seconds)
        asked.append(pacer.decide(stats, 4, 4).tokens > 0)
    late = asked[steps // 2 :]
    return sum(late) / len(late)


def test_speculative_steps_that_feed_prompts_count():
    """Speculation gains on decoding steps and loses more on steps with prompts."""
    non_speculative_s = {DECODES: 0.1, FEEDS: 0.2}
    assert share_on(non_speculative_s, {DECODES: 0.1, FEEDS: 0.21}, committed=5, steps=3000) > 0.9
    assert share_on(non_speculative_s, {DECODES: 0.115, FEEDS: 0.4}, committed=5, steps=3000) < 0.2


def test_a_wait_before_a_step_counts_fully():
    assert share_on({DECODES: 0.1, FEEDS: 0.2}, {DECODES: 0.5, FEEDS: 0.6}, committed=8, steps=3000) < 0.2


def test_a_step_right_after_a_speculative_one_does_not_measure_non_speculative_decoding():
    """Drafters still run during that step."""
    pacer = a_pacer()
    for _ in range(200):
        for step, seconds in ((replace(DECODES, is_drafted_for=True), 0.1), (DECODES, 0.3), (DECODES, 0.1)):
            pacer.record_step(step, 4, 0.1, took_s=seconds)
    assert pacer.load.step.non_speculative_s(4) == pytest.approx(0.1, rel=0.01)


def test_block_delays_are_measured_for_each_octave_of_sessions():
    """Drafters draft for all sessions together, so delays depend on their number."""
    pacer = a_pacer(base_s=0.3)
    stats = a_yield(0.5, 0.25)
    slow = [pacer.decide(stats, 2, 1).hold_step for _ in range(3)]
    quick = [pacer.decide(stats, 2, 8).hold_step for _ in range(3)]
    assert quick == [True] * 3, "nothing is known of eight yet"
    assert [pacer.decide(stats, 2, 1).hold_step for _ in range(2)] == [False] * 2
    assert not slow[-1]


def test_a_newer_draft_is_tried_at_once_though_its_predecessor_lost():
    """Losses of a predecessor would keep a learned draft off for minutes; older versions change nothing."""
    pacer = a_pacer()
    pacer.draft_attached(1)
    for _ in range(1000):
        is_on = pacer.decide(SessionStats(), 4, 4).tokens > 0
        pacer.record_step(replace(DECODES, is_drafted_for=is_on), 4, 0.1, took_s=0.5 if is_on else 0.1)
    assert not pacer.decide(SessionStats(), 4, 4).tokens
    pacer.draft_attached(1)
    pacer.draft_attached(0)
    assert not pacer.decide(SessionStats(), 4, 4).tokens
    pacer.draft_attached(2)
    assert pacer.decide(SessionStats(), 4, 4).tokens
