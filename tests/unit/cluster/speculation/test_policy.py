"""Tests the drafting policy: draft length, waiting time, stopping and probing."""

from dataclasses import replace

import pytest

from cluster.costs import ForwardCost
from cluster.speculation.controller import Adaptive, DraftingDecision, ExpectedBlock, ReferenceLoop
from cluster.speculation.estimators import Load, ReplicaStats, SessionStats, StepCost
from tests.unit.cluster.speculation.samples import DRAFT, LOAD, NOBODY, a_delay, a_yield

PACING = Adaptive()
SLOW = ReplicaStats(delay=a_delay([(1, 0.20), (4, 0.30)] * 20))


def with_hits(blocks: SessionStats, hits: float) -> SessionStats:
    return replace(blocks, hits=hits)


def asked(blocks: SessionStats, limit: int, load: Load = LOAD, replica: ReplicaStats = NOBODY) -> DraftingDecision:
    return PACING.decide(blocks, replica, limit, load, allows_trial=False)


# ---------------------------------------------------------------- waiting time


def test_a_step_waits_for_a_block_worth_more_than_the_time_of_all_sessions():
    hold_for_s = PACING.hold_for_s
    assert hold_for_s([ExpectedBlock(0.6, in_s=0.03)], LOAD) == pytest.approx(0.6 / 15)
    assert hold_for_s([ExpectedBlock(0.6, in_s=0.05)], LOAD) == 0.0, "it comes too late"
    assert hold_for_s([ExpectedBlock(0.6, in_s=0.03)], replace(LOAD, gain=3.0)) == 0.0, "time is worth more"
    assert hold_for_s([ExpectedBlock(0.6, in_s=0.03)], replace(LOAD, sessions=8)) == 0.0, "seven others would wait too"
    assert hold_for_s([ExpectedBlock(0.6, in_s=-0.1)], LOAD) > 0, "it may come at any time"
    assert hold_for_s([], LOAD) == 0.0


def test_blocks_that_arrive_together_share_one_wait_and_a_late_one_is_left_out():
    pair = [ExpectedBlock(0.3, in_s=0.03), ExpectedBlock(0.3, in_s=0.03)]
    assert PACING.hold_for_s(pair[:1], LOAD) == 0.0
    assert PACING.hold_for_s(pair, LOAD) == pytest.approx(0.6 / 15)
    late = ExpectedBlock(0.3, in_s=1.0)
    assert PACING.hold_for_s([late, *pair], LOAD) == PACING.hold_for_s(pair, LOAD)


def test_a_session_skips_steps_only_for_a_valuable_block():
    quick = ReplicaStats(delay=a_delay([(1, 0.011), (4, 0.014)] * 20))
    much = with_hits(a_yield(*[0.98] * 8), 0.0)
    many = replace(LOAD, sessions=4)
    ask = asked(much, 8, many, quick)
    assert ask.hold_step
    assert ask.skip_for_s == pytest.approx(ask.worth * 4 / many.rate)
    little = asked(with_hits(a_yield(0.9), 0.0), 8, many, quick)
    assert (little.hold_step, little.skip_for_s) == (True, 0.0)
    assert not asked(with_hits(much, 0.9), 8, many, quick).skip_for_s, "there will be a block after the step anyway"


def test_no_session_waits_before_the_first_measured_step():
    """Before that, the value of a second is unknown."""
    unmeasured = Load(sessions=4)
    assert unmeasured.rate == 0.0
    decision = asked(with_hits(a_yield(*[0.98] * 8), 0.0), 8, unmeasured, ReplicaStats())
    assert decision.worth > 1.0
    assert decision.skip_for_s == 0.0
    assert PACING.hold_for_s([ExpectedBlock(decision.worth, in_s=0.01)], unmeasured) == 0.0


def test_a_dead_drafter_costs_a_few_short_waits():
    """The test bounds the total over all rounds without a block."""
    waited = with_hits(a_yield(0.9, 0.8), 0.0)
    total = 0.0
    first = asked(waited, 2).worth
    for _ in range(100):
        total += asked(waited, 2).worth
        waited.non_speculative_round()
    assert total <= 2 * first
    waited.block_arrived(0.01)
    assert asked(waited, 2).worth == first, "the drafter is back"


# ---------------------------------------------------------------- draft length


def test_tokens_are_requested_while_they_are_likely_enough():
    assert asked(a_yield(0.9, 0.8, 0.7, 0.6), 4).tokens == 4
    assert asked(a_yield(0.9, 0.8, 0.7, 0.6), 2).tokens == 2
    assert asked(a_yield(0.9, 0.5, 0.01, 0.001), 4).tokens == 2


def test_the_minimum_probability_is_the_marginal_step_cost_of_a_token():
    """A token's acceptance probability must justify its cost in the step."""
    ask = asked(a_yield(0.9, 0.8), 2)
    assert ask.least_chance == pytest.approx(15 * 0.001)
    assert asked(a_yield(0.9, 0.8), 2, replace(LOAD, sessions=20)).least_chance > 5 * ask.least_chance


def test_a_busy_replica_drafts_less_and_finally_nothing():
    """A rejected token displaces a certain one in a full step."""
    blocks = a_yield(0.6, 0.36, 0.22, 0.13)
    full = StepCost.profiled(ForwardCost.linear(0.018, per_token_s=0.002))  # small base cost
    lengths = [asked(blocks, 4, Load(full, sessions), ReplicaStats()).tokens for sessions in (1, 8, 100)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 4
    assert lengths[-1] == 0


def test_slow_drafts_are_not_waited_for_but_used_if_in_time():
    ask = asked(a_yield(0.5, 0.25), 2, replica=SLOW)
    assert (ask.tokens, ask.hold_step) == (2, False)
    assert asked(with_hits(a_yield(0.5, 0.25), 0.0), 2, replica=SLOW).tokens == 0, "none is in time"
    assert asked(a_yield(0.5, 0.25), 2, replica=ReplicaStats()).hold_step, "quick ones are"


def test_a_block_that_is_not_waited_for_is_timed_again_in_a_trial():
    decision = PACING.decide(a_yield(0.5, 0.25), SLOW, 2, LOAD, allows_trial=True)
    assert (decision.tokens, decision.hold_step, decision.is_trial) == (2, True, True)
    waited_for = PACING.decide(a_yield(0.9, 0.8), NOBODY, 2, LOAD, allows_trial=True)
    assert not waited_for.is_trial, "its delay is known"


def test_nothing_is_requested_where_speculation_loses():
    decision = PACING.decide(a_yield(0.9, 0.8), NOBODY, 2, replace(LOAD, speculates=False), allows_trial=True)
    assert decision == DraftingDecision()


def test_drafts_that_do_not_pay_are_tried_with_few_tokens():
    bad = a_yield(0.001, 0.0)
    assert PACING.decide(bad, NOBODY, 4, LOAD, allows_trial=True) == DraftingDecision(), "it was left off only now"
    disabled = replace(bad, is_disabled=True)
    assert PACING.decide(disabled, NOBODY, 4, LOAD, allows_trial=False) == DraftingDecision()
    decision = PACING.decide(disabled, NOBODY, 4, LOAD, allows_trial=True)
    assert 0 < decision.tokens < 4
    assert (decision.hold_step, decision.is_trial) == (True, True)


def test_a_few_rejections_in_a_row_do_not_end_drafting_that_pays():
    """Three rejections in a row are common if half of the blocks are accepted."""
    blocks = SessionStats(delay_s=0.03)
    for accepted in [1, 0] * 10:
        blocks.block_verified(2, 2, range(accepted))
    replica = ReplicaStats(blocks.chances, delay=DRAFT)
    for _ in range(4):
        blocks.block_verified(2, 2, range(0))
    assert asked(blocks, 2, replica=replica).tokens > 0


def test_drafting_stops_and_resumes_at_different_thresholds():
    """Equal thresholds would let noise toggle drafting."""
    chances = [step / 1000 for step in range(1, 1000)]
    gives_up = max(c for c in chances if asked(a_yield(c), 1).tokens == 0)
    resumes = min(c for c in chances if asked(replace(a_yield(c), is_disabled=True), 1).tokens == 1)
    assert gives_up < resumes


# ---------------------------------------------------------------- the reference loop


def test_the_reference_loop_requests_and_waits_for_the_longest_block():
    pacing = ReferenceLoop(patience=2.0)
    ask = pacing.decide(a_yield(0.0), NOBODY, 4, replace(LOAD, speculates=False), allows_trial=False)
    assert (ask.tokens, ask.hold_step) == (4, True)
    assert ask.skip_for_s == pacing.hold_for_s([ExpectedBlock(ask.worth, 9.0)], LOAD) == 2.0
    gone = pacing.decide(replace(a_yield(0.5), missed_rounds=1), NOBODY, 4, LOAD, allows_trial=False)
    assert gone.skip_for_s == pacing.hold_for_s([ExpectedBlock(gone.worth, 0.0)], LOAD) == 0.0
