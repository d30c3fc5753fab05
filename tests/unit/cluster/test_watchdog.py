"""Time limits follow the measured cost within bounds, on an injected clock."""

import pytest

from cluster.watchdog import TimeoutPolicy, Watchdog

POLICY = TimeoutPolicy(max_s=60.0, min_s=10.0, factor=30.0)


@pytest.mark.parametrize(("expected_s", "limit_s"), [(0.001, 10.0), (1 / 3, 10.0), (1.0, 30.0), (60.0, 60.0)])
def test_the_limit_follows_the_measured_cost_within_bounds(expected_s: float, limit_s: float):
    """A millisecond step that takes a second is slow but not stuck."""
    assert POLICY.limit_s(expected_s) == limit_s
    assert Watchdog(POLICY).begin_task(expected_s, 5.0) == limit_s


def test_without_a_measurement_the_limit_is_the_maximum():
    assert POLICY.limit_s(None) == 60.0


def test_the_maximum_outranks_the_minimum():
    assert TimeoutPolicy(max_s=3.0, min_s=10.0).limit_s(0.001) == 3.0


def test_work_beyond_its_limit_is_stuck_and_its_duration_is_returned():
    watch = Watchdog(POLICY)
    limit_s = watch.begin_task(0.01, now=100.0)
    assert watch.stuck_s(100.0 + limit_s) is None
    assert watch.stuck_s(101.0 + limit_s) == 1.0 + limit_s


def test_each_piece_of_work_has_its_own_limit():
    watch = Watchdog(POLICY)
    for begun in range(100):
        watch.begin_task(0.01, now=float(begun))
        assert watch.stuck_s(begun + 1.0) is None
    assert watch.stuck_s(99.0 + 11.0) is not None


def test_an_idle_worker_is_never_stuck():
    watch = Watchdog(POLICY)
    assert watch.stuck_s(1e9) is None
    watch.begin_task(0.01, now=0.0)
    watch.end_task()
    assert watch.stuck_s(1e9) is None
