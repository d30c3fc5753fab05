"""Bad blocks are detected within a few blocks and with few false alarms."""

import random
from collections.abc import Sequence
from statistics import median

import pytest

from cluster.draft_quality import CusumDetector

ALARMS = 1e-4  # largest rate of false alarms per block


def test_good_blocks_that_become_bad_raise_the_alarm_and_blocks_that_were_never_good_do_not():
    collapsed = spell_until_collapse(spell(CusumDetector(), 1, 12))
    assert 3 < collapsed.latest.count < 50, "a few rejections in a row prove nothing"
    assert not spell(CusumDetector(), 0, 500).is_collapsed


def alarms(seed: int, *spells: tuple[float, int]) -> list[int]:
    """Returns the block counts at which alarms occurred; each spell has an acceptance rate and a length in blocks.

    After an alarm, the drafter restarts without improvement.
    """
    rng = random.Random(seed)
    drift = CusumDetector()
    found = []
    chances = [acceptance for acceptance, length in spells for _ in range(length)]
    for count, chance in enumerate(chances, 1):
        drift = drift.after(rng.random() < chance)
        if drift.is_collapsed:
            drift = CusumDetector()
            found.append(count)
    return found


def alarms_per_block(sessions: int, *spells: tuple[float, int]) -> float:
    """Returns the alarm rate per block over many sessions."""
    count = sum(len(alarms(seed, *spells)) for seed in range(sessions))
    return count / (sessions * sum(length for _, length in spells))


@pytest.mark.parametrize(("collapsed", "usually", "at_most"), [(0.0, 10, 15), (0.1, 13, 60), (0.2, 19, 120)])
def test_a_collapse_is_found_within_few_blocks(collapsed: float, usually: int, at_most: int):
    """A desynchronized drafter still predicts easy text."""
    good = 100
    delays = [alarms(seed, (0.8, good), (collapsed, at_most))[0] - good for seed in range(400)]
    assert min(delays) > 3, "a few rejections in a row prove nothing"
    assert median(delays) <= usually


def test_a_short_history_is_enough_for_a_collapse():
    """Detection takes more blocks with a short history."""
    found = [bool(alarms(seed, (0.8, 16), (0.1, 60))) for seed in range(400)]
    assert sum(found) > 0.95 * len(found)


@pytest.mark.parametrize(("acceptance", "rate"), [(0.95, 1e-5), (0.8, 1e-5), (0.5, 2e-5), (0.2, ALARMS), (0.05, 1e-5)])
def test_unchanged_acceptance_raises_no_more_alarms_than_documented(acceptance: float, rate: float):
    assert alarms_per_block(400, (acceptance, 1000)) <= rate


def test_false_alarms_are_as_rare_in_short_sessions():
    """The sessions have the minimum history, at the acceptance rate with the most false alarms."""
    assert 0 < alarms_per_block(5000, (0.2, 100)) <= ALARMS


@pytest.mark.parametrize("spells", [((0.8, 150), (0.7, 350)), ((0.5, 150), (0.43, 350)), ((0.95, 150), (0.81, 350))])
def test_texts_that_become_harder_raise_no_more_alarms_than_documented(spells: Sequence[tuple[float, int]]):
    assert alarms_per_block(400, *spells) <= ALARMS


def test_a_draft_that_was_always_poor_cannot_collapse():
    assert alarms_per_block(400, (0.05, 300), (0.0, 300)) <= 1e-5


def test_an_alarm_keeps_the_history_and_resets_the_evidence():
    """A drafter that is no better after a resync is detected again after the same number of blocks."""
    drift = spell(CusumDetector(), 1, 100)
    first = spell_until_collapse(drift)
    assert first.latest.value == 0.0
    assert first.usual > 0.98
    again = first.anew()
    assert (again.usual, again.evidence, again.is_collapsed) == (first.usual, 0.0, False)
    assert spell_until_collapse(again).latest.count == first.latest.count


def spell(drift: CusumDetector, accepted: int, blocks: int) -> CusumDetector:
    for _ in range(blocks):
        drift = drift.after(accepted)
    return drift


def spell_until_collapse(drift: CusumDetector) -> CusumDetector:
    for _ in range(100):
        if drift.is_collapsed:
            break
        drift = drift.after(0)
    assert drift.is_collapsed
    return drift
