"""Pool sizes follow only lasting needs."""

from cluster.autoscaling import StabilizationWindow

UP_S = 10.0
DOWN_S = 100.0


def followed(needs: list[tuple[float, int]], present: int = 2) -> int:
    """Returns the size after the given (time, wish) pairs."""
    history = StabilizationWindow.at_start(present, needs[0][0])
    for now, desired in needs:
        history = history.after(desired, now)
        present = history.size(present, now, UP_S, DOWN_S)
    return present


def test_growth_needs_a_need_that_lasted_throughout_the_delay() -> None:
    assert followed([(0, 4), (9, 4)]) == 2
    assert followed([(0, 4), (10, 4)]) == 4
    assert followed([(0, 4), (5, 2), (10, 4), (15, 4)]) == 2, "a moment without begins it anew"


def test_growth_stops_at_the_least_need_of_the_delay() -> None:
    assert followed([(0, 5), (5, 3), (10, 6)]) == 3


def test_shrinking_stops_at_the_greatest_need_of_the_delay() -> None:
    assert followed([(0, 1), (100, 1)], present=4) == 4
    assert followed([(0, 1), (101, 1)], present=4) == 1
    assert followed([(0, 1), (50, 3), (101, 1), (150, 1)], present=4) == 3
    assert followed([(0, 1), (50, 3), (101, 1), (151, 1)], present=4) == 1


def test_a_pool_may_shrink_to_zero_and_grow_again() -> None:
    assert followed([(0, 0), (101, 0)], present=1) == 0
    assert followed([(0, 1), (10, 1)], present=0) == 1


def test_an_empty_history_shrinks_nothing_at_once() -> None:
    """A restarted controller has an empty history."""
    assert followed([(1000, 1)], present=4) == 4
