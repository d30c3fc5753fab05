"""What blows are said to cost, on streams and pools of a few numbers."""

import pytest

from tests.chaos.recovery import Blow, Sizes, Stream, stall_s, table, whole_s

BLOW = Blow("target killed", 10.0, ("Target",))
WANTED = {"Target": 2, "Drafter": 1}


def sizes(*targets: tuple[float, int]) -> list[Sizes]:
    return [Sizes(at_s, {"Target": running, "Drafter": 1}) for at_s, running in targets]


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ([Stream(1.0, [9.0, 10.5, 30.0])], 0.5),
        ([Stream(1.0, [9.0, 10.5]), Stream(9.0, [13.0])], 3.0),  # the latter had not begun to answer
        ([Stream(1.0, [9.0])], 0.0),  # it was over
        ([Stream(11.0, [15.0])], 0.0),  # it came after
        ([], 0.0),
    ],
)
def test_a_pause_lasts_until_every_stream_that_was_open_goes_on(streams: list[Stream], expected: float) -> None:
    assert stall_s(BLOW, streams) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (sizes((9.0, 2), (11.0, 1), (14.0, 1), (16.0, 2), (20.0, 2)), 6.0),
        (sizes((9.0, 1), (11.0, 2), (12.0, 1), (13.0, 2)), 3.0),  # it lacked one before, and was not struck yet
        (sizes((11.0, 2), (24.0, 2), (40.0, 1), (41.0, 2)), None),  # what is lost much later has another cause
        (sizes((11.0, 1), (40.0, 1)), None),
        (sizes((9.0, 1)), None),
    ],
)
def test_a_pool_is_whole_again_once_it_lacked_one_and_does_no_more(seen: list[Sizes], expected: float | None) -> None:
    assert whole_s(BLOW, seen, WANTED) == expected


def test_pools_that_were_not_struck_do_not_count() -> None:
    seen = [Sizes(11.0, {"Target": 1, "Drafter": 1}), Sizes(12.0, {"Target": 2, "Drafter": 1})]
    assert whole_s(Blow("drafter killed", 10.0, ("Drafter",)), seen, WANTED) is None


def test_the_table_has_a_row_for_each_kind() -> None:
    blows = [BLOW, Blow("target killed", 20.0, ("Target",)), Blow("stream cut", 30.0)]
    streams = [Stream(1.0, [10.5, 23.0, 30.1])]
    seen = sizes((9.0, 2), (11.0, 1), (12.0, 2), (21.0, 1), (25.0, 2))
    assert table(blows, streams, seen, WANTED)[2:] == [
        "| stream cut | 1 | 0.1 (most 0.1) | - |",
        "| target killed | 2 | 1.8 (most 3.0) | 3.5 (most 5.0) |",
    ]
