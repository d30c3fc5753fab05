"""Tests the reported cost of failures on small streams and pools."""

import pytest

from tests.chaos.recovery import LOST_NOTICED_S, NOTICED_S, Failure, Sizes, Stream, is_open, stall_s, table, whole_s

KILL = Failure("target killed", 10.0, ("Target",))
STOP = Failure("target stopped", 10.0, ("Target",), stopped_s=2.0)
WANTED = {"Target": 2, "Drafter": 1}


def sizes(*targets: tuple[float, int]) -> list[Sizes]:
    return [Sizes(at_s, {"Target": running, "Drafter": 1}) for at_s, running in targets]


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ([Stream(1.0, [9.0, 10.5, 11.0, 12.5, 30.0])], 1.5),
        ([Stream(1.0, [9.0, 10.5, 30.0])], 19.5),  # a chunk was in transit
        ([Stream(1.0, [9.0, 10.5]), Stream(9.0, [13.0])], 3.0),  # the second had not begun to answer
        ([Stream(11.0, [15.0])], 4.0),  # began right after the failure
        ([Stream(1.0, [9.0])], 0.0),  # had ended
        ([Stream(12.5, [15.0])], 0.0),  # began later
        ([], 0.0),
    ],
)
def test_a_pause_lasts_until_every_open_stream_continues(streams: list[Stream], expected: float) -> None:
    assert stall_s(KILL, streams) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (sizes((9.0, 2), (11.0, 1), (14.0, 1), (16.0, 2), (20.0, 2)), 6.0),
        (sizes((9.0, 1), (11.0, 2), (12.0, 1), (13.0, 2)), 3.0),  # incomplete before the failure
        (sizes((11.0, 2), (24.0, 2), (40.0, 1), (41.0, 2)), 31.0),  # a lost node is noticed late
        (sizes((11.0, 2), (131.0, 2), (132.0, 1), (133.0, 2)), None),  # a much later loss has another cause
        (sizes((11.0, 1), (40.0, 1)), None),
        (sizes((9.0, 1)), None),
    ],
)
def test_a_pool_is_recovered_once_it_lacked_one_and_is_complete(seen: list[Sizes], expected: float | None) -> None:
    assert whole_s(KILL, seen, WANTED) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (sizes((11.0, 2), (26.0, 1), (31.0, 2)), 21.0),
        (sizes((11.0, 2), (28.0, 2), (30.0, 1), (31.0, 2)), None),  # a much later loss has another cause
    ],
)
def test_a_resumed_replica_may_be_replaced_afterwards(seen: list[Sizes], expected: float | None) -> None:
    assert whole_s(STOP, seen, WANTED) == expected


@pytest.mark.parametrize(
    ("failure", "seen", "now_s", "expected"),
    [
        (KILL, sizes((11.0, 2)), 11.0, True),  # not noticed yet
        (KILL, sizes((11.0, 2), (12.0, 1)), 12.0, True),
        (KILL, sizes((11.0, 1), (12.0, 2)), 12.0, False),
        (KILL, sizes((11.0, 1), (900.0, 1)), 900.0, True),  # however long it takes
        (KILL, sizes((11.0, 2), (900.0, 1)), 900.0, False),  # has another cause
        (KILL, sizes((11.0, 2)), 10.0 + LOST_NOTICED_S + 1, False),
        (STOP, sizes((11.0, 2)), 12.0 + NOTICED_S, True),
        (STOP, sizes((11.0, 2)), 12.0 + NOTICED_S + 1, False),
        (STOP, sizes((20.0, 1), (50.0, 1)), 50.0, True),
        (Failure("stream cut", 10.0), sizes((11.0, 2)), 11.0, False),
    ],
)
def test_a_fault_is_open_until_its_pool_recovers(
    failure: Failure, seen: list[Sizes], now_s: float, expected: bool
) -> None:
    assert is_open(failure, seen, WANTED, now_s) == expected


def test_other_pools_do_not_count() -> None:
    seen = [Sizes(11.0, {"Target": 1, "Drafter": 1}), Sizes(12.0, {"Target": 2, "Drafter": 1})]
    assert whole_s(Failure("drafter killed", 10.0, ("Drafter",)), seen, WANTED) is None


def test_the_table_has_a_row_for_each_kind() -> None:
    failures = [KILL, Failure("target killed", 20.0, ("Target",)), Failure("stream cut", 30.0)]
    streams = [Stream(1.0, [10.5, 12.1, 19.9, 23.0, 30.1])]
    seen = sizes((9.0, 2), (11.0, 1), (12.0, 2), (21.0, 1), (25.0, 2))
    assert table(failures, streams, seen, WANTED)[2:] == [
        "| stream cut | 1 | 0.1 (most 0.1) | - |",
        "| target killed | 2 | 2.3 (most 3.0) | 3.5 (most 5.0) |",
    ]
