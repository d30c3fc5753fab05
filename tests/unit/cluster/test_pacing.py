"""Patience: waiting for a block must fade when it is in vain, and must be tried again."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.pacing import PROBE_EVERY, StepCost, Yield, patience_s

STEP = StepCost(0.1)


def test_patience_grows_with_what_waiting_brings_and_with_what_a_step_costs():
    assert patience_s(Yield(3.0), STEP) > patience_s(Yield(1.0), STEP) > 0
    assert patience_s(Yield(1.0), StepCost(0.2)) > patience_s(Yield(1.0), STEP)
    assert patience_s(Yield(1.0), StepCost()) == 0.0, "nothing is waited before a step was measured"


@given(st.lists(st.integers(0, 8), max_size=20))
def test_a_dead_drafter_costs_a_bounded_wait_until_the_probe(blocks):
    """The sum over all vain rounds, not only each: patience must not be paid for ever."""
    waited = Yield()
    for accepted in blocks:
        waited = waited.after_block(accepted)
    first, total = patience_s(waited, STEP), 0.0
    for _ in range(PROBE_EVERY - 1):
        total += patience_s(waited, STEP)
        waited = waited.after_plain_round()
    assert total <= 2 * first
    assert patience_s(waited, STEP) < 1e-6


def test_a_written_off_drafter_is_probed_and_can_come_back():
    waited = Yield()
    rounds = []
    for _ in range(2 * PROBE_EVERY + 1):
        rounds.append(patience_s(waited, STEP))
        waited = waited.after_plain_round()
    assert rounds[PROBE_EVERY] == rounds[2 * PROBE_EVERY] == STEP.seconds
    assert max(rounds[20:PROBE_EVERY] + rounds[PROBE_EVERY + 1 : -1]) < 1e-6
    back = waited.after_arrival(0.01).after_block(4)
    assert back.vain_rounds == 0
    assert patience_s(back, STEP) > STEP.seconds / 2


def test_nobody_waits_for_a_block_that_will_not_be_there_in_time():
    """Blocks that take longer than waiting pays are used when they come; the target goes on meanwhile."""
    slow = Yield(accepted=1.0)
    for _ in range(20):
        slow = slow.after_arrival(0.15)
    assert patience_s(slow, STEP) == 0.0
    assert patience_s(slow, StepCost(0.2)) > 0, "with dearer steps the same wait pays"


def test_step_cost_starts_at_the_first_measure_and_then_smooths():
    cost = StepCost().after_step(0.2)
    assert cost.seconds == 0.2
    assert 0.2 < cost.after_step(1.0).seconds < 0.3
