"""Tests the controller's decisions over many rounds of steps and blocks."""

from dataclasses import replace
from itertools import count

import pytest

from cluster.costs import ForwardCost
from cluster.speculation.controller import Adaptive, LockStep, SpeculationController, StepShape
from cluster.speculation.estimators import DraftValue
from tests.unit.cluster.speculation.samples import drafting

PROFILE = ForwardCost.linear(0.099, per_token_s=0.001)


def a_pacer(token_s: float = 0.005, base_s: float = 0.01) -> SpeculationController:
    """Returns the controller of a replica with ten tokens per second and this block delay."""
    pacer = SpeculationController(Adaptive(), PROFILE)
    for tokens in (1, 4) * 20:
        pacer.block_arrived(tokens, base_s + tokens * token_s)
    return pacer


def rounds(pacer: SpeculationController, drafts: DraftValue, good: bool, number: int) -> list[bool]:
    """Runs rounds of 0.1 s; returns whether each requested a block."""
    asked = []
    for _ in range(number):
        tokens = pacer.decide(drafts, 4, 1, next(CLOCK)).tokens
        asked.append(tokens > 0)
        accepted = tokens if good else 0
        if tokens:
            pacer.block_verified(drafts, tokens, 4, tokens, range(accepted))
        drafts.round_ended(accepted, is_missed=False, has_hit=False)
        shape = StepShape(rows=1, tokens=1 + tokens, decoding=1, is_drafted_for=tokens > 0, is_open_to_drafts=True)
        pacer.record_step(shape, 1 + accepted, 0.1, 0.1)
    return asked


CLOCK = count(step=0.1)


def test_drafting_stops_when_it_does_not_pay_and_resumes_within_seconds_when_it_does():
    pacer = a_pacer()
    drafts = drafting()
    assert sum(rounds(pacer, drafts, True, 50)) > 30
    rounds(pacer, drafts, False, 200)
    assert sum(rounds(pacer, drafts, False, 400)) < 40
    rounds(pacer, drafts, True, 100)
    assert sum(rounds(pacer, drafts, True, 50)) > 30


def test_a_drafter_without_blocks_gets_few_requests():
    """A missing block counts as rejected."""
    pacer = a_pacer()
    drafts = drafting()
    asked = []
    for _ in range(200):
        tokens = pacer.decide(drafts, 4, 1, next(CLOCK)).tokens
        asked.append(tokens > 0)
        if tokens:
            pacer.block_missed(drafts, tokens, 0.1)
        drafts.round_ended(0, is_missed=tokens > 0, has_hit=False)
        shape = StepShape(1, 1, 1, is_drafted_for=tokens > 0, is_open_to_drafts=True)
        pacer.record_step(shape, 1, 0.1, 0.1)
    assert asked[0]
    assert sum(asked[100:]) < 50


def test_new_sessions_do_not_wait_for_blocks_that_others_awaited_in_vain():
    pacer = a_pacer()
    assert pacer.decide(drafting(), 4, 1, next(CLOCK)).hold_step
    for _ in range(20):
        pacer.block_missed(DraftValue(), 4, 0.1)
        pacer.record_step(StepShape(1, 1, 1, is_drafted_for=True, is_open_to_drafts=True), 1, 0.1, 0.2)
    pacer.decide(drafting(), 4, 1, next(CLOCK))  # may be a probe
    assert not pacer.decide(drafting(), 4, 1, next(CLOCK)).hold_step


def test_steps_that_feed_prompts_leave_the_rate_unchanged():
    pacer = a_pacer()
    step = StepShape(rows=1, tokens=1, decoding=1)
    pacer.record_step(replace(step, prompts=1, prompt_tokens=8, tokens=9), 1, 5.0, 5.0)
    assert pacer.load.step.non_speculative_s(1) == pytest.approx(0.1)
    pacer.record_step(step, 1, 0.2, 0.2)
    assert pacer.load.step.non_speculative_s(1) > 0.1


DECODES = StepShape(rows=4, tokens=4, decoding=4, is_open_to_drafts=True)
FEEDS = replace(DECODES, rows=5, tokens=34, prompts=1, prompt_tokens=30)


def share_on(
    non_speculative_s: dict[StepShape, float], drafted_s: dict[StepShape, float], committed: int, steps: int
) -> float:
    """Returns the final share of steps with requested drafts, given step times with and without them."""
    pacer = a_pacer()
    drafts = drafting()
    asked = [False]
    now_s = 0.0
    for index in range(steps):
        step = FEEDS if index % 4 == 0 else DECODES
        is_on = asked[-1]
        seconds = drafted_s[step] if is_on else non_speculative_s[step]
        now_s += seconds
        pacer.record_step(replace(step, is_drafted_for=is_on), committed if is_on else 4, 0.1, seconds)
        asked.append(pacer.decide(drafts, 4, 4, now_s).tokens > 0)
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
            pacer.record_step(step, 4, 0.1, seconds)
    assert pacer.load.step.non_speculative_s(4) == pytest.approx(0.1, rel=0.01)


def test_a_newer_draft_is_tried_at_once_though_its_predecessor_lost():
    """Losses of a predecessor would keep a learned draft off for minutes; older versions change nothing."""
    pacer = a_pacer()
    pacer.draft_attached(1)
    now_s = 0.0
    for _ in range(1000):
        is_on = pacer.decide(drafting(), 4, 4, now_s).tokens > 0
        took_s = 0.5 if is_on else 0.1
        now_s += took_s
        pacer.record_step(replace(DECODES, is_drafted_for=is_on), 4, 0.1, took_s)
    assert not pacer.decide(drafting(), 4, 4, now_s).tokens
    pacer.draft_attached(1)
    pacer.draft_attached(0)
    assert not pacer.decide(drafting(), 4, 4, now_s).tokens
    pacer.draft_attached(2)
    assert pacer.decide(drafting(), 4, 4, now_s).tokens


def test_drafts_are_requested_again_long_after_bad_drafters_have_left():
    """An empty draft pool grows only if drafts are requested."""
    pacer = a_pacer()
    rounds(pacer, drafting(), False, 400)
    began = next(CLOCK)
    assert not pacer.decide(DraftValue(), 4, 1, began).tokens
    assert not pacer.decide(DraftValue(), 4, 1, began + 100).tokens
    assert pacer.decide(DraftValue(), 4, 1, began + 1000).tokens


def test_estimates_of_drafters_outlast_times_without_sessions():
    pacer = a_pacer()
    rounds(pacer, drafting(), False, 400)
    now = next(CLOCK)
    for _ in range(10):
        assert not pacer.decide(DraftValue(), 4, 1, now).tokens
        pacer.decide(drafting(), 4, 1, now)
        now += 1000


@pytest.mark.parametrize(("policy", "tokens"), [(LockStep(), 24), (Adaptive(), 16)], ids=["lock step", "adaptive"])
def test_long_drafts_are_requested_as_the_schedule_allows(policy, tokens):
    pacer = SpeculationController(policy, profile=None)
    drafts = drafting()
    for _ in range(100):
        pacer.block_verified(drafts, 16, 24, 16, range(16))
    assert pacer.decide(drafts, 24, 2, next(CLOCK)).tokens == tokens
