"""Tests the number of rows that fit into a forward pass of limited duration."""

import math

from cluster.drafting.lookahead import ForwardTime


def learnt(*forwards: tuple[int, float]) -> ForwardTime:
    found = ForwardTime()
    for rows, seconds in forwards:
        found.learn(rows, seconds)
    return found


def test_without_measurements_no_rows_are_left_out() -> None:
    assert ForwardTime().max_rows(8, 0.001) == 8


def test_rows_are_limited_by_a_line_through_the_measured_times() -> None:
    line = learnt(*[(rows, 0.006 + 0.001 * rows) for rows in (1, 4, 2, 8, 1)])
    assert [line.max_rows(8, seconds) for seconds in (0.0065, 0.0075, 0.0105, 0.1, math.inf)] == [0, 1, 4, 8, 8]


def test_with_a_constant_forward_time_all_rows_fit_or_none() -> None:
    for flat in (learnt((4, 0.01), (4, 0.01)), learnt((1, 0.01), (8, 0.01)), learnt((1, 0.012), (8, 0.008))):
        assert [flat.max_rows(8, seconds) for seconds in (0.009, 0.011, math.inf)] == [0, 8, 8]


def test_old_measurements_fade() -> None:
    line = learnt(*[(rows, 0.1 * rows) for rows in (1, 2) * 50], *[(rows, 0.01 * rows) for rows in (1, 2) * 200])
    assert line.max_rows(8, 0.0401) in (3, 4)
