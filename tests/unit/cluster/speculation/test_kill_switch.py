"""The kill switch pauses speculation at loads with a measured loss."""

import random
from itertools import groupby

import pytest

from cluster.speculation.controller import KillSwitch

SHARE = 0.015  # limit of the time share for measurements and trials


def run(record: KillSwitch, sessions: int, gain: float, steps: int, spread: float = 0.5) -> list[bool]:
    """Returns whether each step requested drafts, given this mean gain from speculation."""
    drawn = random.Random(0)
    on = []
    for _ in range(steps):
        on.append(record.is_on(sessions))
        if on[-1]:
            record.step(sessions, sessions * drawn.gauss(gain, spread), sessions, 1.0)
        else:
            record.non_speculative_step(sessions, 1.0)
    return on


def runs(on: list[bool], state: bool) -> list[int]:
    """Returns the lengths of the runs of steps in this state."""
    return [len(list(steps)) for is_on, steps in groupby(on) if is_on is state]


LOOK = runs(run(KillSwitch(), 4, 1.5, 100), False)[0]  # steps of one measurement of non-speculative decoding


def pauses(on: list[bool]) -> list[int]:
    """Returns the lengths of runs of steps without drafts that exceed a measurement."""
    return [steps for steps in runs(on, False) if steps > LOOK]


def test_no_loss_is_concluded_before_two_looks_at_non_speculative_steps():
    """The first few non-speculative steps may have been lucky."""
    record = KillSwitch()
    run(record, 1, 0.8, 3 * LOOK, spread=0.0)
    assert record.gain(1) == 1.0, "the early loss is forgotten"
    assert pauses(run(record, 1, 1.2, 2000, spread=0.1)) == []


def test_non_speculative_steps_are_looked_at_twice_soon_and_then_less_and_less_often():
    on = run(KillSwitch(), 4, 1.5, 4000)
    assert set(runs(on, False)) == {LOOK}
    first, second, *later, _ = runs(on, True)
    assert first < second < 100
    assert max(later) > 200
    record = KillSwitch()
    run(record, 4, 0.1, LOOK)
    assert record.gain(4) == 1.0, "nothing is concluded before the first look"


def test_looks_cost_a_bounded_share_of_the_time_however_much_speculation_gains():
    for gain in (1.1, 1.5, 4.0):
        on = run(KillSwitch(), 4, gain, 20_000, spread=0.1)
        assert (gain - 1) * on.count(False) < SHARE * gain * len(on)


@pytest.mark.parametrize("gain", [0.3, 0.8, 0.95])
def test_a_loss_costs_a_bounded_share_of_the_time_however_large_it_is(gain):
    steps = 40_000
    on = run(KillSwitch(), 4, gain, steps)
    assert (1 - gain) * sum(on) < SHARE * steps
    assert sum(on[steps // 2 :]), "speculation may have begun to pay"


def test_pauses_lengthen_with_each_further_loss_until_speculation_wins():
    record = KillSwitch()
    first, *again = pauses(run(record, 4, 0.7, 30_000, spread=0.1))
    assert first < again[0] < again[1] < again[2]
    run(record, 4, 1.5, 10_000, spread=0.1)
    assert record.is_on(4)
    assert pauses(run(record, 4, 0.7, 3_000, spread=0.1))[0] < again[0], "earlier losses are forgotten"


def test_pauses_are_bounded_however_often_speculation_loses():
    record = KillSwitch()
    lengths = []
    for _ in range(300):
        paused = 0
        while not record.is_on(4):
            record.non_speculative_step(4, 1.0)
            paused += 1
        lengths.append(paused)
        while record.is_on(4):
            record.step(4, 1.0, 4.0, 1.0)
    assert max(lengths[-200:-100]) == max(lengths[-100:]) < 100_000


@pytest.mark.parametrize("pace", [0.5, 2.0])
def test_a_pause_ends_when_the_machine_becomes_quiet_or_busy(pace):
    record = KillSwitch()
    run(record, 4, 0.5, 4000, spread=0.1)
    while record.is_on(4):
        record.step(4, 1.0, 4.0, 1.0)
    for _ in range(100):
        record.non_speculative_step(4, 1.1)
    assert not record.is_on(4), "the pace varies a little all the time"
    record.non_speculative_step(4, pace)
    assert record.is_on(4)


def test_a_large_loss_pauses_speculation_for_longer():
    little, much = (pauses(run(KillSwitch(), 4, gain, 4000, spread=0.1)) for gain in (0.9, 0.5))
    assert little[0] < much[0]


def test_winning_speculation_stays_on_in_spite_of_noise():
    on = run(KillSwitch(), 1, 1.25, 20_000, spread=0.8)
    assert sum(on) > 0.95 * len(on)


def test_a_close_call_is_looked_at_more_often():
    close, clear = (run(KillSwitch(), 4, gain, 2000, spread=0.1) for gain in (1.1, 1.6))
    assert 0.9 * len(close) < sum(close) < sum(clear)


def test_each_load_has_its_own_record():
    record = KillSwitch()
    run(record, 1, 1.4, 400, spread=0.1)
    run(record, 9, 0.7, 400, spread=0.1)
    assert record.is_on(1)
    assert not any(record.is_on(sessions) for sessions in range(6, 12)), "one more or less is the same load"
    assert record.gain(1) > 1.3
