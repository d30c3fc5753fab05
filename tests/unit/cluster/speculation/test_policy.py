"""Tests the drafting policy: draft length, waiting time, stopping and probing."""

from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.costs import ForwardCost
from cluster.speculation.controller import Adaptive, DraftingDecision, ExpectedBlock, LockStep, SilentDrafters
from cluster.speculation.estimators import DraftValue, Load, StepCost
from tests.unit.cluster.speculation.samples import LOAD, a_delay, a_value, drafting

SLOW = replace(LOAD, delay=a_delay([(1, 0.20), (4, 0.30)] * 20), accepted=(0.5, 0.25), gain=1.0)
USELESS = replace(LOAD, accepted=(0.001, 0.0))
NEVER = 1e9  # seconds; a time long after all pauses


def asked(load: Load, limit: int, drafts: DraftValue | None = None) -> DraftingDecision:
    """Returns the decision of a policy that has just probed another session in vain."""
    policy = Adaptive()
    other = DraftValue(-4.0)
    for _ in range(2):
        policy.decide(other, limit, replace(USELESS, sessions=load.sessions), 0.0)
    return policy.decide(drafts or DraftValue(), limit, replace(load), 0.0)


# ---------------------------------------------------------------- waiting time


def test_a_step_waits_for_a_block_worth_more_than_the_time_of_all_sessions():
    hold_for_s = Adaptive().hold_for_s
    assert hold_for_s([ExpectedBlock(0.6, in_s=0.03)], LOAD) == pytest.approx(0.6 / 10)
    assert hold_for_s([ExpectedBlock(0.6, in_s=0.07)], LOAD) == 0.0, "it comes too late"
    assert hold_for_s([ExpectedBlock(0.6, in_s=0.03)], replace(LOAD, sessions=8)) == 0.0, "seven others would wait too"
    assert hold_for_s([ExpectedBlock(0.6, in_s=-0.1)], LOAD) > 0, "it may come at any time"
    assert hold_for_s([], LOAD) == 0.0


def test_blocks_that_arrive_together_share_one_wait_and_a_late_one_is_left_out():
    pair = [ExpectedBlock(0.3, in_s=0.04), ExpectedBlock(0.3, in_s=0.04)]
    assert Adaptive().hold_for_s(pair[:1], LOAD) == 0.0
    assert Adaptive().hold_for_s(pair, LOAD) == pytest.approx(0.6 / 10)
    late = ExpectedBlock(0.3, in_s=1.0)
    assert Adaptive().hold_for_s([late, *pair], LOAD) == Adaptive().hold_for_s(pair, LOAD)


def test_a_session_skips_steps_only_for_a_valuable_block():
    quick = replace(LOAD, sessions=4, accepted=(0.98,) * 4, hits=0.0, delay=a_delay([(1, 0.011), (4, 0.014)] * 20))
    ask = asked(quick, 4)
    assert ask.hold_step
    assert ask.skip_for_s == pytest.approx(ask.worth * 4 / quick.non_speculative_rate)
    little = asked(replace(quick, accepted=(0.9,)), 4)
    assert (little.hold_step, little.skip_for_s) == (True, 0.0)
    assert not asked(replace(quick, hits=0.9), 4).skip_for_s, "there will be a block after the step anyway"


def test_no_session_waits_before_the_first_measured_step():
    """Before that, the value of a second is unknown."""
    unmeasured = Load(sessions=4, accepted=(0.98,) * 8, hits=0.0)
    assert unmeasured.rate == 0.0
    decision = asked(unmeasured, 8)
    assert decision.worth > 1.0
    assert decision.skip_for_s == 0.0
    assert Adaptive().hold_for_s([ExpectedBlock(decision.worth, in_s=0.01)], unmeasured) == 0.0


def test_a_silent_drafter_is_awaited_at_growing_intervals_until_its_next_message():
    silent = SilentDrafters()
    awaited = []
    for index in range(1000):
        if silent.is_awaited("d"):
            awaited.append(index)
        silent.missed({"d"})
    assert 1 < sum(index < 30 for index in awaited) < 10
    assert len(awaited) < 20
    assert max(later - earlier for earlier, later in pairwise(awaited)) < 200, "it may come back"
    assert silent.is_awaited("other")
    silent.answered("d")
    assert silent.is_awaited("d")


# ---------------------------------------------------------------- draft length


def test_tokens_are_requested_while_they_are_likely_enough():
    assert asked(LOAD, 4).tokens == 4
    assert asked(LOAD, 2).tokens == 2
    assert asked(replace(LOAD, accepted=(0.9, 0.5, 0.01, 0.001)), 4).tokens == 2


def test_a_session_drafts_less_if_its_own_acceptance_is_lower():
    lengths = [asked(LOAD, 4, a_value(chance)).tokens for chance in (0.9, 0.2, 0.01)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] == 0


def test_the_minimum_probability_is_the_marginal_step_cost_of_a_token():
    """A token's acceptance probability must justify its cost in the step."""
    ask = asked(LOAD, 2)
    assert ask.least_chance == pytest.approx(15 * 0.001)
    assert asked(replace(LOAD, sessions=20), 2).least_chance > 5 * ask.least_chance


def test_a_busy_replica_drafts_less_and_finally_nothing():
    """A rejected token displaces a certain one in a full step."""
    full = StepCost(ForwardCost.linear(0.018, per_token_s=0.002))  # small base cost
    usual = (0.6, 0.36, 0.22, 0.13)
    lengths = [asked(Load(full, sessions, accepted=usual), 4).tokens for sessions in (1, 8, 100)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 4
    assert lengths[-1] == 0


def test_slow_drafts_are_not_waited_for_but_used_if_in_time():
    ask = asked(SLOW, 2)
    assert (ask.tokens, ask.hold_step) == (2, False)
    assert asked(replace(SLOW, hits=0.0), 2).tokens == 0, "none is in time"
    assert asked(replace(SLOW, delay=LOAD.delay), 2).hold_step, "quick ones are"


def test_nothing_is_requested_where_speculation_loses():
    policy = Adaptive()
    assert policy.decide(DraftValue(), 2, replace(LOAD, speculates=False), NEVER) == DraftingDecision()


# ---------------------------------------------------------------- probes


def probes(policy: Adaptive, drafts: list[DraftValue], load: Load, seconds: float, begin: float = 0.0) -> list[float]:
    """Returns the times of probes of sessions that decide every 10 ms, without acceptance."""
    found = []
    for index in range(int(100 * seconds)):
        now = begin + index / 100
        for one in drafts:
            decision = policy.decide(one, 4, load, now)
            if decision.hold_step:
                found.append(now)
            one.round_ended(0, is_missed=False, has_hit=False)
    return found


@pytest.mark.parametrize("load", [USELESS, SLOW], ids=["useless", "slow"])
def test_drafts_that_do_not_pay_are_probed_at_doubling_intervals_of_at_most_seconds(load):
    """Thus speculation returns within seconds, and probes cost little at any number of sessions."""
    one, many = (probes(Adaptive(), [drafting() for _ in range(count)], load, 60.0) for count in (1, 20))
    for times in (one, many):
        gaps = [later - earlier for earlier, later in pairwise(times[2:])]
        assert gaps[0] < gaps[-1]
        assert 2 < gaps[-1] < 6
    assert len(many) < 2 * len(one)


@pytest.mark.parametrize("slowed", [2.0, 1.0])
def test_the_backoff_of_probes_restarts_when_the_pace_of_steps_changes(slowed):
    """Probes fail under other load on the machine; speculation must return within seconds after that load ends."""
    step = StepCost(ForwardCost.linear(0.099, per_token_s=0.001))

    def run_steps(seconds: float) -> None:
        for _ in range(40):
            step.non_speculative(1, seconds)

    policy = Adaptive()
    drafts = drafting()
    load = replace(USELESS, step=step)
    run_steps(0.1 * slowed)
    before = probes(policy, [drafts], load, 60.0)
    run_steps(0.1)
    after = probes(policy, [drafts], load, 4.0, begin=60.0)
    assert (len(after) > 2) == (slowed > 1), "only a changed pace restarts the backoff"
    assert before[-1] - before[-2] > 3


def test_a_probe_requests_few_tokens():
    decision = Adaptive().decide(drafting(), 4, USELESS, NEVER)
    assert 0 < decision.tokens < 4
    assert decision.hold_step


def test_a_probe_waits_only_after_the_first_answer_of_its_drafter():
    """Until then, the drafter may be reading the prompt."""
    policy = Adaptive()
    drafts, other = DraftValue(is_attached=True), DraftValue(is_attached=True)
    for now in (100.0, 100.1):
        assert not policy.decide(DraftValue(), 4, USELESS, now).tokens, "no drafter is attached"
        assert policy.decide(drafts, 4, USELESS, now) == DraftingDecision(2)
        assert not policy.decide(other, 4, USELESS, now).tokens, "one session at a time"
    drafts.block_arrived(None)
    assert policy.decide(drafts, 4, USELESS, 100.2).hold_step


def test_a_probe_goes_on_while_its_tokens_are_accepted():
    policy = Adaptive()
    drafts = drafting()
    for _ in range(20):
        assert policy.decide(drafts, 4, USELESS, 100.0).tokens
        drafts.round_ended(1, is_missed=False, has_hit=False)
    drafts.round_ended(0, is_missed=False, has_hit=False)
    assert not policy.decide(drafts, 4, USELESS, 100.0).tokens


def test_a_probe_ends_if_verifying_costs_more_than_its_accepted_tokens_are_worth():
    dear = StepCost(ForwardCost.linear(0.04, per_token_s=0.06))  # two more tokens cost 1.2 steps
    load = replace(USELESS, step=dear, gain=1.0)
    policy = Adaptive()
    drafts = drafting()
    assert policy.decide(drafts, 4, load, 100.0).tokens == 2
    drafts.round_ended(1, is_missed=False, has_hit=False)
    assert not policy.decide(drafts, 4, load, 100.1).tokens


# ---------------------------------------------------------------- lock step


def test_lock_step_requests_and_waits_for_the_longest_block():
    pacing = LockStep(patience=2.0)
    ask = pacing.decide(DraftValue(-4.0), 4, replace(LOAD, speculates=False), 0.0)
    assert (ask.tokens, ask.hold_step) == (4, True)
    assert ask.skip_for_s == pacing.hold_for_s([ExpectedBlock(ask.worth, 9.0)], LOAD) == 2.0
    gone = pacing.decide(DraftValue(missed=1), 4, LOAD, 0.0)
    assert gone.skip_for_s == pacing.hold_for_s([ExpectedBlock(gone.worth, 0.0)], LOAD) == 0.0
