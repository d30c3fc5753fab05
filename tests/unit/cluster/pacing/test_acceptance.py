"""What to expect of blocks by those before them, and when a drafter must be out of step."""

import random
from collections.abc import Sequence
from statistics import median

import pytest

from cluster.pacing.acceptance import ALARM, POSITIONS, PRIOR, PROOF, Chances, SessionStats, out_of_step
from tests.unit.cluster.pacing.pacing_samples import a_yield

NOBODY = Chances()  # whose blocks say what to expect


def p_accepted(blocks: Chances, others: Chances) -> list[float]:
    return [chance for chance, _, _ in blocks.outlook(others, POSITIONS)]


def test_survival_is_learnt_by_position_from_few_blocks():
    blocks = Chances()
    assert p_accepted(blocks, NOBODY)[:2] == list(PRIOR[:2]), "before anything was seen"
    for _ in range(8):
        blocks = blocks.after(asked=2, drafted=2, accepted=1)
    first, second, third, *_ = p_accepted(blocks, NOBODY)
    assert first > 0.7
    assert second < 0.15
    assert third == PRIOR[2], "nothing was asked for there"


def test_little_known_sessions_are_taken_to_fare_like_the_others():
    replica = Chances()
    for _ in range(30):
        replica = replica.after(asked=4, drafted=4, accepted=0)
    assert p_accepted(Chances(), replica)[0] < 0.1
    good = Chances()
    for _ in range(20):
        good = good.after(asked=4, drafted=4, accepted=4)
    assert p_accepted(good, replica)[0] > 0.6, "but what a session shows itself counts for more"


def test_positions_that_were_not_asked_for_for_long_are_unknown_again():
    """Or a block that was short once would stay short."""
    blocks = Chances()
    for _ in range(20):
        blocks = blocks.after(asked=3, drafted=3, accepted=1)
    pessimistic = p_accepted(blocks, NOBODY)[2]
    for _ in range(100):
        blocks = blocks.after(asked=1, drafted=1, accepted=1)
    assert pessimistic < PRIOR[2] / 2
    assert p_accepted(blocks, NOBODY)[2] == pytest.approx(PRIOR[2], abs=0.01)


def test_a_block_that_ended_in_doubt_counts_as_asked_for():
    """Otherwise the tokens that were drafted with confidence would stand for all."""
    blocks = Chances().after(asked=2, drafted=1, accepted=1)
    assert p_accepted(blocks, NOBODY)[1] < PRIOR[1]
    assert blocks.outlook(NOBODY, 2)[1][2] < 1.0


def test_good_blocks_that_turn_bad_raise_the_alarm_and_merely_bad_ones_do_not():
    good = a_yield(0.5, 0.25)
    for _ in range(PROOF):
        good = good.after_block(2, 2, 1)
    rejected = 0
    while not out_of_step(good):
        good = good.after_block(2, 2, 0)
        rejected = rejected + 1
        assert rejected < 50
    assert rejected > 3, "a few rejections in a row are nothing"
    assert not out_of_step(good.after_alarm())
    bad = a_yield(0.5, 0.25)
    for _ in range(500):
        bad = bad.after_block(2, 2, 0)
    assert not out_of_step(bad), "it never was better"


def alarms(seed: int, *spells: tuple[float, int]) -> list[int]:
    """After which blocks of a session there was one; a spell is an acceptance, and for how many blocks it lasts.

    After an alarm the drafter begins anew, and drafts no better for it.
    """
    rng = random.Random(seed)
    blocks = SessionStats()
    found = []
    chances = [acceptance for acceptance, length in spells for _ in range(length)]
    for count, chance in enumerate(chances, 1):
        blocks = blocks.after_block(1, 1, rng.random() < chance)
        if out_of_step(blocks):
            blocks = blocks.after_alarm()
            found.append(count)
    return found


def alarms_per_block(sessions: int, *spells: tuple[float, int]) -> float:
    """Over so many sessions."""
    count = sum(len(alarms(seed, *spells)) for seed in range(sessions))
    return count / (sessions * sum(length for _, length in spells))


@pytest.mark.parametrize(("collapsed", "usually", "at_most"), [(0.0, 10, 15), (0.1, 13, 60), (0.2, 19, 120)])
def test_a_collapse_is_found_within_few_blocks(collapsed: float, usually: int, at_most: int):
    """It need not be complete: text that is easy to guess is guessed by a drafter out of step too."""
    good = 100
    delays = [alarms(seed, (0.8, good), (collapsed, at_most))[0] - good for seed in range(400)]
    assert min(delays) > 3, "a few rejections in a row are nothing"
    assert median(delays) <= usually


def test_a_short_history_is_enough_for_a_collapse():
    """Then more blocks are needed."""
    found = [bool(alarms(seed, (0.8, 2 * PROOF), (0.1, 60))) for seed in range(400)]
    assert sum(found) > 0.95 * len(found)


@pytest.mark.parametrize(("acceptance", "rate"), [(0.95, 1e-5), (0.8, 1e-5), (0.5, 2e-5), (0.2, ALARM), (0.05, 1e-5)])
def test_blocks_that_fare_as_ever_raise_no_more_alarms_than_is_said(acceptance: float, rate: float):
    assert alarms_per_block(400, (acceptance, 1000)) <= rate


def test_false_alarms_are_as_rare_in_short_sessions():
    """Where least is known of what is usual; at the acceptance at which they come closest to what is allowed."""
    assert 0 < alarms_per_block(5000, (0.2, 100)) <= ALARM


@pytest.mark.parametrize("spells", [((0.8, 150), (0.7, 350)), ((0.5, 150), (0.43, 350)), ((0.95, 150), (0.81, 350))])
def test_texts_that_become_harder_raise_no_more_alarms_than_is_said(spells: Sequence[tuple[float, int]]):
    assert alarms_per_block(400, *spells) <= ALARM


def test_what_was_always_poor_cannot_collapse():
    assert alarms_per_block(400, (0.05, 300), (0.0, 300)) <= 1e-5


def test_after_an_alarm_the_history_begins_anew():
    """Beginning anew that did not help is not tried again; and what recovered can collapse once more."""
    for_good = ((0.8, 100), (0.1, 400))
    again = ((0.8, 100), (0.1, 50), (0.8, 100), (0.1, 150))
    assert sum(len(alarms(seed, *for_good)) for seed in range(200)) <= 200 * (1 + 400 * ALARM)
    assert [len(alarms(seed, *again)) for seed in range(200)] == [2] * 200
