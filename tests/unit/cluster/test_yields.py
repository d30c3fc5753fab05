"""What to expect of blocks by those before them, and when a drafter must be out of step."""

import pytest

from cluster.yields import POSITIONS, PRIOR, PROOF, Chances, out_of_step
from tests.unit.cluster.pacing_samples import a_yield

NOBODY = Chances()  # whose blocks say what to expect


def survival(blocks: Chances, others: Chances) -> list[float]:
    return [chance for chance, _, _ in blocks.outlook(others, POSITIONS)]


def test_survival_is_learnt_by_position_from_few_blocks():
    blocks = Chances()
    assert survival(blocks, NOBODY)[:2] == list(PRIOR[:2]), "before anything was seen"
    for _ in range(8):
        blocks = blocks.after(asked=2, drafted=2, accepted=1)
    first, second, third, *_ = survival(blocks, NOBODY)
    assert first > 0.7
    assert second < 0.15
    assert third == PRIOR[2], "nothing was asked for there"


def test_little_known_sessions_are_taken_to_fare_like_the_others():
    fleet = Chances()
    for _ in range(30):
        fleet = fleet.after(asked=4, drafted=4, accepted=0)
    assert survival(Chances(), fleet)[0] < 0.1
    good = Chances()
    for _ in range(20):
        good = good.after(asked=4, drafted=4, accepted=4)
    assert survival(good, fleet)[0] > 0.6, "but what a session shows itself counts for more"


def test_positions_that_were_not_asked_for_for_long_are_unknown_again():
    """Or a block that was short once would stay short."""
    blocks = Chances()
    for _ in range(20):
        blocks = blocks.after(asked=3, drafted=3, accepted=1)
    pessimistic = survival(blocks, NOBODY)[2]
    for _ in range(100):
        blocks = blocks.after(asked=1, drafted=1, accepted=1)
    assert pessimistic < PRIOR[2] / 2
    assert survival(blocks, NOBODY)[2] == pytest.approx(PRIOR[2], abs=0.01)


def test_a_block_that_ended_in_doubt_counts_as_asked_for():
    """Otherwise the tokens that were drafted with confidence would stand for all."""
    blocks = Chances().after(asked=2, drafted=1, accepted=1)
    assert survival(blocks, NOBODY)[1] < PRIOR[1]
    assert blocks.outlook(NOBODY, 2)[1][2] < 1.0


def test_good_blocks_that_turn_bad_raise_the_alarm_and_merely_bad_ones_do_not():
    good = a_yield(0.5, 0.25)
    for _ in range(PROOF):
        good = good.after_block(2, 2, 1)
    rejected = 0
    while not out_of_step(good):
        good, rejected = good.after_block(2, 2, 0), rejected + 1
        assert rejected < 50
    assert rejected > 3, "a few rejections in a row are nothing"
    assert not out_of_step(good.after_alarm())
    bad = a_yield(0.5, 0.25)
    for _ in range(500):
        bad = bad.after_block(2, 2, 0)
    assert not out_of_step(bad), "it never was better"
