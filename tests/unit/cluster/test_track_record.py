"""Where speculation loses in fact it is left off for a while."""

import random

from cluster.track_record import FIRST_LOOK, FIRST_PAUSE, LONGEST_PAUSE, LOOK_STEPS, TrackRecord


def run(record: TrackRecord, sessions: int, gain: float, steps: int, spread: float = 0.5) -> list[bool]:
    """Whether drafts were asked for at each step, where speculation has such a gain on average."""
    drawn, on = random.Random(0), []
    for _ in range(steps):
        on.append(record.is_on(sessions))
        if on[-1]:
            record.step(sessions, sessions * drawn.gauss(gain, spread), sessions)
        else:
            record.plain_step(sessions)
    return on


def test_soon_there_are_plain_steps_to_see_what_they_cost_and_nothing_is_concluded_before():
    on = run(TrackRecord(), 4, 1.5, 100)
    assert on == [*[True] * FIRST_LOOK, *[False] * LOOK_STEPS, *[True] * (100 - FIRST_LOOK - LOOK_STEPS)]
    record = TrackRecord()
    run(record, 4, 0.1, FIRST_LOOK)
    assert record.gain(4) == 1.0


def test_speculation_that_loses_is_left_off_for_longer_and_longer():
    on = run(TrackRecord(), 4, 0.8, 40_000)
    assert sum(on) < 0.03 * len(on)
    pauses = [len(run) for run in "".join("x" if o else "." for o in on).split("x") if run]
    assert pauses[1:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE]
    assert max(pauses) == LONGEST_PAUSE


def test_speculation_that_wins_stays_on_but_for_a_few_plain_steps_now_and_then():
    """However much single steps differ."""
    on = run(TrackRecord(), 1, 1.25, 20_000, spread=0.8)
    assert sum(on) > 0.95 * len(on)


def test_where_it_is_a_close_call_plain_steps_are_looked_at_more_often():
    close, clear = (run(TrackRecord(), 4, gain, 2000, spread=0.1) for gain in (1.1, 1.6))
    assert 0.9 * len(close) < sum(close) < sum(clear)


def test_loads_have_their_own_records():
    record = TrackRecord()
    run(record, 1, 1.4, 400, spread=0.1)
    run(record, 9, 0.7, 400, spread=0.1)
    assert record.is_on(1)
    assert not any(record.is_on(sessions) for sessions in range(6, 12)), "one more or less is the same load"
    assert record.gain(1) > 1.3
