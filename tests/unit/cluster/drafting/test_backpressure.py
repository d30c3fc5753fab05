"""The number of sessions that a drafter accepts, by whether its blocks are in time."""

from cluster.drafting.session_table import LEAST_WINDOW, WINDOW_BLOCKS, Capacity


def window(capacity: Capacity, late: float, sessions: int) -> int:
    """A whole window with this share of late blocks; how many sessions are to be given up."""
    size = max(LEAST_WINDOW, WINDOW_BLOCKS * sessions)
    *before, last = [capacity.note(index < late * size, sessions) for index in range(size)]
    assert not any(before), "a decision before the window is over"
    return last


def test_a_quarter_is_given_up_while_most_blocks_are_late():
    capacity = Capacity(64)
    assert window(capacity, 0.6, 16) == 4
    assert capacity.sessions == 12
    assert window(capacity, 0.6, 12) == 3
    assert window(capacity, 0.6, 2) == 1
    assert window(capacity, 0.6, 1) == 0, "the last one may be slow, but nobody is in its way"
    assert capacity.sessions == 1


def test_room_is_made_again_step_by_step_while_blocks_are_in_time():
    capacity = Capacity(12)
    window(capacity, 0.6, 12)
    taken = []
    for _ in range(5):
        assert window(capacity, 0, 9) == 0
        taken.append(capacity.sessions)
    assert taken == [10, 11, 12, 12, 12]


def test_what_is_neither_late_nor_in_time_changes_nothing():
    capacity = Capacity(12)
    assert window(capacity, 0.25, 8) == 0
    assert window(capacity, 0.5, 8) == 0
    assert capacity.sessions == 12


def test_more_sessions_are_watched_for_longer():
    capacity = Capacity(64)
    assert not any(capacity.note(late=True, sessions=64) for _ in range(WINDOW_BLOCKS * 64 - 1))
    assert capacity.note(late=True, sessions=64) == 16
