"""Speculation is off for a while where it was measured to lose."""

import random
from itertools import groupby

import pytest

from cluster.speculation.controller import LONGEST_PAUSE, LOOK_STEPS, PRICE, PROOF, KillSwitch


def run(record: KillSwitch, sessions: int, gain: float, steps: int, spread: float = 0.5) -> list[bool]:
    """Returns at each step whether drafts were requested, if speculation has this gain on average."""
    drawn = random.Random(0)
    on = []
    for _ in range(steps):
        on.append(record.is_on(sessions))
        if on[-1]:
            record.step(sessions, sessions * drawn.gauss(gain, spread), sessions)
        else:
            record.non_speculative_step(sessions)
    return on


def pauses(on: list[bool]) -> list[int]:
    """The lengths of the runs of steps without drafts, but for those in which plain steps are looked at."""
    runs = [len(list(steps)) for asked, steps in groupby(on) if not asked]
    return [steps for steps in runs if steps > LOOK_STEPS]


def test_nothing_is_called_a_loss_before_plain_steps_were_looked_at_twice():
    """The first few may have been lucky."""
    record = KillSwitch()
    run(record, 1, 0.8, LOOK_STEPS + LOOK_STEPS + PROOF, spread=0.0)
    assert record.gain(1) == 1.0, "what seemed to be lost is forgotten"
    assert pauses(run(record, 1, 1.2, 2000, spread=0.1)) == [], "plain steps cost more than they seemed to"


def test_soon_and_soon_again_plain_steps_are_looked_at_and_nothing_is_concluded_before():
    on = run(KillSwitch(), 4, 1.5, 4000)
    runs = [(asked, len(list(steps))) for asked, steps in groupby(on)]
    looks = [steps for asked, steps in runs if not asked]
    assert set(looks) == {LOOK_STEPS}
    first, second, *later, _ = [steps for asked, steps in runs if asked]
    assert first == LOOK_STEPS < second < 100
    assert max(later) > 200, "then more and more seldom"
    record = KillSwitch()
    run(record, 4, 0.1, LOOK_STEPS)
    assert record.gain(4) == 1.0


def test_what_plain_steps_cost_is_looked_at_for_a_price_however_much_speculation_brings():
    for gain in (1.1, 1.5, 4.0):
        on = run(KillSwitch(), 4, gain, 20_000, spread=0.1)
        assert (gain - 1) * on.count(False) < 1.5 * PRICE * gain * len(on)


@pytest.mark.parametrize("gain", [0.3, 0.8, 0.95])
def test_what_speculation_loses_has_its_price(gain):
    """However much it loses: what loses more is tried less often."""
    steps = 40_000
    on = run(KillSwitch(), 4, gain, steps)
    assert (1 - gain) * sum(on) < 1.5 * PRICE * steps
    assert sum(on[steps // 2 :]), "it may have come to pay by now"


def test_what_loses_again_and_again_is_left_off_for_longer_and_longer():
    record = KillSwitch()
    first, *again = pauses(run(record, 4, 0.7, 30_000, spread=0.1))
    assert first < again[0] < again[1] < again[2] <= LONGEST_PAUSE
    run(record, 4, 1.5, 10_000, spread=0.1)
    assert record.is_on(4), "it has come to pay"
    assert pauses(run(record, 4, 0.7, 3_000, spread=0.1))[0] < again[0], "its losses before are forgotten"


def test_however_often_it_lost_there_is_a_next_pause():
    record = KillSwitch()
    for _ in range(1100):  # a pause that doubled as often would be too long for a float
        while not record.is_on(4):
            record.non_speculative_step(4)
        while record.is_on(4):
            record.step(4, 1.0, 4.0)
    assert pauses(run(record, 4, 0.25, 2 * LONGEST_PAUSE, spread=0.0))[0] == LONGEST_PAUSE


def test_what_loses_much_is_left_off_for_longer():
    little, much = (pauses(run(KillSwitch(), 4, gain, 4000, spread=0.1)) for gain in (0.9, 0.5))
    assert little[0] < much[0]


def test_speculation_that_wins_stays_on_but_for_a_few_plain_steps_now_and_then():
    """However much single steps differ."""
    on = run(KillSwitch(), 1, 1.25, 20_000, spread=0.8)
    assert sum(on) > 0.95 * len(on)


def test_where_it_is_a_close_call_plain_steps_are_looked_at_more_often():
    close, clear = (run(KillSwitch(), 4, gain, 2000, spread=0.1) for gain in (1.1, 1.6))
    assert 0.9 * len(close) < sum(close) < sum(clear)


def test_loads_have_their_own_records():
    record = KillSwitch()
    run(record, 1, 1.4, 400, spread=0.1)
    run(record, 9, 0.7, 400, spread=0.1)
    assert record.is_on(1)
    assert not any(record.is_on(sessions) for sessions in range(6, 12)), "one more or less is the same load"
    assert record.gain(1) > 1.3


# ---------------------------------------------------------------- trials of single sessions


@pytest.mark.parametrize("sessions", [1, 32])
def test_few_steps_have_a_trial_however_many_sessions_there_are(sessions):
    """It holds all of them up: one in a hundred rounds was every third step of 32 sessions."""
    gate = KillSwitch()
    steps = 10_000
    trials = 0
    for _ in range(steps * sessions):
        is_trial = gate.may_try
        gate.round(sessions, is_trial)
        trials += is_trial
    assert 0.5 * PRICE * steps < trials <= PRICE * steps + 1


def test_a_trial_has_to_be_paid_for_before_the_next_begins():
    gate = KillSwitch()
    for _ in range(2):
        gate.round(1, is_trial=True)
    for _ in range(int(2 / PRICE) - 1):
        assert not gate.may_try
        gate.round(1, is_trial=False)
    assert gate.may_try
