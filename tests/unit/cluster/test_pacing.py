"""When drafts pay: how long to wait, how far to draft, when to stop and when to try again."""

import itertools
from dataclasses import replace

import pytest

from cluster.pacing import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    POSITIONS,
    PRIOR,
    PROBE_EVERY,
    PROOF,
    TRIAL_ROUNDS,
    Adaptive,
    Chances,
    Cost,
    Load,
    LockStep,
    Yield,
    out_of_step,
)

STEP = Cost.profiled([(1, 0.100), (11, 0.110)] * 20)  # 1 ms a token
DRAFT = Cost.profiled([(1, 0.015), (4, 0.030)] * 20)  # 10 ms, and 5 ms a token
LOAD = Load(STEP, DRAFT, sessions=1, gain=1.5)  # 15 tokens/s
PACING = Adaptive()
MUCH = 1e6  # blocks: what is known of others does not count any more


def a_yield(*survival: float, delay_s: float = 0.03) -> Yield:
    chances = [*survival, *[0.0] * (POSITIONS - len(survival))]
    seen = Chances(asked=(MUCH,) * POSITIONS, reached=tuple(MUCH * chance for chance in chances))
    whole = Chances(asked=(MUCH,) * POSITIONS, reached=(MUCH,) * POSITIONS)
    return Yield(accepted=seen, drafted=whole, delay_s=delay_s)


# ---------------------------------------------------------------- what is measured


def test_costs_are_found_by_least_squares_and_follow_the_machine():
    assert (STEP.base_s, STEP.token_s) == (pytest.approx(0.099), pytest.approx(0.001))
    slower = STEP
    for _ in range(600):
        slower = slower.after(1, 0.2).after(11, 0.4)
    assert (slower.base_s, slower.token_s) == (pytest.approx(0.18, rel=0.02), pytest.approx(0.02, rel=0.02))


def test_steps_of_one_size_say_nothing_of_a_tokens_cost():
    cost = Cost.profiled([(4, 0.1)] * 5)
    assert (cost.base_s, cost.token_s) == (pytest.approx(0.1), 0.0)
    assert (Cost().base_s, Cost().token_s) == (0.0, 0.0)


def test_a_noisy_machine_makes_no_cost_negative():
    cost = Cost.profiled([(1, 0.3), (20, 0.1)])
    assert cost.token_s == 0.0
    assert Cost.profiled([(1, 0.001), (20, 1.0)]).base_s >= 0.0


def test_survival_is_learnt_by_position_from_few_blocks():
    blocks = Yield()
    assert LOAD.survival(blocks)[:2] == PRIOR[:2], "before anything was seen"
    for _ in range(8):
        blocks = blocks.after_block(asked=2, drafted=2, accepted=1)
    first, second, third, *_ = LOAD.survival(blocks)
    assert first > 0.7
    assert second < 0.15
    assert third == PRIOR[2], "nothing was asked for there"


def test_little_known_sessions_are_taken_to_fare_like_the_others():
    fleet = Yield()
    for _ in range(30):
        fleet = fleet.after_block(asked=4, drafted=4, accepted=0)
    load = replace(LOAD, fleet=fleet)
    assert load.survival(Yield())[0] < 0.1
    good = Yield()
    for _ in range(20):
        good = good.after_block(asked=4, drafted=4, accepted=4)
    assert load.survival(good)[0] > 0.6, "but what a session shows itself counts for more"


def test_positions_that_were_not_asked_for_for_long_are_unknown_again():
    """Or a block that was short once would stay short."""
    blocks = Yield()
    for _ in range(20):
        blocks = blocks.after_block(asked=3, drafted=3, accepted=1)
    pessimistic = LOAD.survival(blocks)[2]
    for _ in range(100):
        blocks = blocks.after_block(asked=1, drafted=1, accepted=1)
    assert pessimistic < PRIOR[2] / 2
    assert LOAD.survival(blocks)[2] == pytest.approx(PRIOR[2], abs=0.01)


def test_a_block_that_ended_in_doubt_counts_as_asked_for():
    """Otherwise the tokens that were drafted with confidence would stand for all."""
    blocks = Yield().after_block(asked=2, drafted=1, accepted=1)
    assert LOAD.survival(blocks)[1] < PRIOR[1]
    assert LOAD.reach(blocks)[1] < 1.0


def test_the_rate_follows_the_number_of_sessions_at_once():
    assert LOAD.rate == pytest.approx(15.0)
    assert replace(LOAD, sessions=11).rate == pytest.approx(1.5 * 11 / 0.110)
    assert Load().rate == 0.0


# ---------------------------------------------------------------- how long to wait


def test_patience_grows_with_what_a_block_brings_and_with_what_a_second_is_worth():
    good, poor = a_yield(0.9, 0.8), a_yield(0.6, 0.3)
    assert PACING.patience_s(good, 2, LOAD) > PACING.patience_s(poor, 2, LOAD) > 0
    assert PACING.patience_s(good, 2, LOAD) > PACING.patience_s(good, 1, LOAD)
    assert PACING.patience_s(good, 2, replace(LOAD, gain=3.0)) < PACING.patience_s(good, 2, LOAD)
    assert PACING.patience_s(good, 2, Load()) == 0.0, "nothing is waited before a step was measured"


def test_a_block_that_is_expected_too_late_is_not_waited_for():
    late = a_yield(0.5, 0.25, delay_s=0.06)
    assert PACING.patience_s(late, 2, LOAD) == 0.0
    assert PACING.patience_s(late, 2, replace(LOAD, gain=0.5)) > 0


def test_a_dead_drafter_costs_a_few_short_waits():
    """The sum over all vain rounds, not only each: patience must not be paid for ever."""
    waited, total = a_yield(0.9, 0.8), 0.0
    first = PACING.patience_s(waited, 2, LOAD)
    for _ in range(PROBE_EVERY - 1):
        total += PACING.patience_s(waited, 2, LOAD)
        waited = waited.after_plain_round()
    assert total < 2 * first
    assert PACING.patience_s(waited.after_plain_round(), 2, LOAD) == STEP.latest_s, "now and then it is tried again"
    assert PACING.patience_s(waited.after_arrival(0.01), 2, LOAD) == first, "the drafter is back"


# ---------------------------------------------------------------- how far to draft


def test_each_token_is_asked_for_as_long_as_it_is_likely_enough():
    assert PACING.draft_tokens(a_yield(0.9, 0.8, 0.7, 0.6), 4, LOAD)[0] == 4
    assert PACING.draft_tokens(a_yield(0.9, 0.8, 0.7, 0.6), 2, LOAD)[0] == 2
    assert PACING.draft_tokens(a_yield(0.9, 0.5, 0.05, 0.01), 4, LOAD)[0] == 2


def test_a_busy_replica_drafts_less_and_at_last_not_at_all():
    """In full steps a rejected token takes the place of one that is sure."""
    blocks = a_yield(0.6, 0.36, 0.22, 0.13)
    full = Cost.profiled([(1, 0.02), (101, 0.22)] * 20)  # 2 ms a token, hardly a base
    asked = []
    for sessions in (1, 8, 100):
        asked.append(PACING.draft_tokens(blocks, 4, Load(full, Cost(), sessions))[0])
    assert asked == sorted(asked, reverse=True)
    assert asked[0] == 4
    assert asked[-1] == 0


def test_blocks_that_are_there_already_cost_no_wait():
    slow = Cost.profiled([(1, 0.20), (4, 0.30)] * 20)
    blocks = a_yield(0.5, 0.25)
    assert PACING.draft_tokens(blocks, 2, replace(LOAD, draft=slow))[0] == 0
    assert PACING.draft_tokens(replace(blocks, hits=1.0), 2, replace(LOAD, draft=slow))[0] == 2


def test_what_does_not_pay_pauses_and_is_tried_more_and_more_rarely():
    blocks = a_yield(0.01, 0.0)
    asked = []
    for _ in range(3000):
        length, blocks = PACING.draft_tokens(blocks, 4, LOAD)
        asked.append(length)
    trials = [i for i, length in enumerate(asked) if length and not asked[i - 1]]
    assert trials[0] == FIRST_PAUSE
    gaps = [b - a for a, b in itertools.pairwise(trials)]
    assert gaps == sorted(gaps)
    assert gaps[-1] <= LONGEST_PAUSE + TRIAL_ROUNDS
    assert sum(asked) < len(asked) / 100


def test_a_trial_waits_for_its_block_however_little_is_expected_of_it():
    bad = replace(a_yield(0.01, 0.0), paused=FIRST_PAUSE)
    assert PACING.patience_s(bad, 1, LOAD) > bad.delay_s
    assert PACING.patience_s(replace(bad, paused=0), 1, LOAD) == 0.0


def test_drafting_comes_back_when_it_pays_again():
    """A trial goes on while its tokens are accepted, until that is enough."""
    bad = Yield(delay_s=0.03)
    for _ in range(40):
        bad = bad.after_block(2, 2, 0)
    load = replace(LOAD, fleet=bad)
    length, blocks = PACING.draft_tokens(bad, 2, load)
    assert length == 0
    rounds = 0
    while not (length and not blocks.paused):
        length, blocks = PACING.draft_tokens(blocks, 2, load)
        if length:
            blocks = blocks.after_block(length, length, length)
        rounds += 1
        assert rounds < 4 * FIRST_PAUSE
    assert length >= 1


def test_a_few_rejections_in_a_row_do_not_end_drafting_that_pays():
    """With half of the blocks accepted, three rejections in a row are an everyday thing."""
    blocks = Yield(delay_s=0.03)
    for _ in range(10):
        blocks = blocks.after_block(2, 2, 1).after_block(2, 2, 0)
    load = replace(LOAD, fleet=blocks)
    for _ in range(4):
        blocks = blocks.after_block(2, 2, 0)
    assert PACING.draft_tokens(blocks, 2, load)[0] > 0


def test_the_edge_between_drafting_and_not_has_two_sides():
    """Or noise would switch it to and fro."""
    chances = [step / 1000 for step in range(1, 1000)]
    gives_up = max(c for c in chances if PACING.draft_tokens(a_yield(c), 1, LOAD)[0] == 0)
    takes_up = min(c for c in chances if PACING.draft_tokens(replace(a_yield(c), paused=1), 1, LOAD)[0] == 1)
    assert gives_up < takes_up


# ---------------------------------------------------------------- lock-step, alarm


def test_lock_step_waits_for_all_and_asks_for_all():
    pacing = LockStep(patience=2.0)
    assert pacing.patience_s(a_yield(0.0), 4, LOAD) == pacing.hold_s(LOAD) == 2.0
    assert pacing.draft_tokens(a_yield(0.0), 4, LOAD)[0] == 4
    assert pacing.patience_s(a_yield(0.5).after_plain_round(), 4, LOAD) == 0.0, "but not for a drafter that is gone"


def test_good_blocks_that_turn_bad_raise_the_alarm_and_merely_bad_ones_do_not():
    good = a_yield(0.5, 0.25)
    for _ in range(PROOF):
        good = good.after_block(2, 2, 1)
    rejected = 0
    while not out_of_step(good):
        good, rejected = good.after_block(2, 2, 0), rejected + 1
        assert rejected < 50
    assert rejected > 3, "a few rejections in a row are nothing"
    assert not out_of_step(good.after_alarm())
    bad = a_yield(0.5, 0.25)
    for _ in range(500):
        bad = bad.after_block(2, 2, 0)
    assert not out_of_step(bad), "it never was better"
