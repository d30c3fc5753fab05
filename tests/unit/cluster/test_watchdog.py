"""The time limit of a piece of work follows its measured cost, within bounds; the clock is injected."""

import pytest

from cluster.watchdog import LEAST_S, MOST_S, TIMES, TimeoutPolicy, Watchdog


@pytest.mark.parametrize(
    ("expected_s", "limit_s"),
    [
        (0.001, LEAST_S),  # a step of a millisecond that takes a second is slow, not stuck
        (LEAST_S / TIMES, LEAST_S),
        (1.0, TIMES),
        (MOST_S, MOST_S),
        (None, MOST_S),  # nothing was measured
    ],
)
def test_patience_follows_what_was_measured_within_bounds(expected_s: float | None, limit_s: float):
    assert TimeoutPolicy().limit_s(expected_s) == limit_s
    assert Watchdog(TimeoutPolicy()).works(expected_s, 5.0) == limit_s


def test_who_allows_little_at_most_is_not_kept_waiting():
    assert TimeoutPolicy(most_s=3.0).limit_s(0.001) == 3.0


def test_work_that_takes_longer_than_it_may_is_stuck_and_for_how_long():
    watch = Watchdog(TimeoutPolicy())
    limit_s = watch.works(0.01, now=100.0)
    assert watch.stuck_s(100.0 + limit_s) is None
    assert watch.stuck_s(101.0 + limit_s) == 1.0 + limit_s


def test_each_piece_of_work_has_its_own_time():
    watch = Watchdog(TimeoutPolicy())
    for begun in range(100):
        watch.works(0.01, now=float(begun))
        assert watch.stuck_s(begun + 1.0) is None
    assert watch.stuck_s(99.0 + LEAST_S + 1.0) is not None


def test_who_has_nothing_to_do_may_rest_for_ever():
    watch = Watchdog(TimeoutPolicy())
    assert watch.stuck_s(1e9) is None
    watch.works(0.01, now=0.0)
    watch.rests()
    assert watch.stuck_s(1e9) is None
