"""Acceptance probability of lookup candidates, by kind and by earlier results."""

import random

import numpy as np
import pytest

from actors.drafters.lookup.ngram import MOST_SURE, NgramCalibration, Occurrences, occurrences
from cluster.drafting.trees import Choices

ONCE = (1, 2, 3, 9, 1, 2)  # 3 followed once
THRICE = (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2)
DIVIDED = (1, 2, 3, 1, 2, 4, 1, 2)


def known(tokens: tuple[int, ...]) -> Occurrences:
    return occurrences(np.array(tokens, dtype=np.int32), 4, 2)


def considered(calibration: NgramCalibration, tokens: tuple[int, ...], session: str = "s") -> Choices:
    return calibration.consider(session, (len(tokens), ()), known(tokens))


def told(calibration: NgramCalibration, tokens: tuple[int, ...], came: int, session: str = "s") -> None:
    considered(calibration, tokens, session)
    calibration.decided(session, (*tokens, came))


def test_nothing_is_sure_and_more_evidence_is_surer():
    calibration = NgramCalibration()
    once = considered(calibration, ONCE).chance_of(3)
    thrice = considered(calibration, THRICE).chance_of(3)
    assert 0.3 < once < thrice <= MOST_SURE


def test_several_continuations_share_a_chance_and_the_likelier_is_first():
    choices = considered(NgramCalibration(), DIVIDED)
    assert choices.tokens == (4, 3)
    assert choices.chances[0] > choices.chances[1] > 0.1
    assert sum(choices.chances) < 0.8


def test_a_text_without_an_answer_gives_no_choice():
    assert considered(NgramCalibration(), (1, 2, 3)) == Choices((), ())


def test_a_lookup_that_is_often_wrong_gets_a_low_chance_and_of_its_kind_alone():
    calibration = NgramCalibration()
    before = considered(calibration, THRICE, "other").chance_of(3)
    for index in range(60):
        told(calibration, ONCE, came=8, session=f"s{index}")
    assert considered(calibration, ONCE, "new").chance_of(3) < 0.1
    assert considered(calibration, THRICE, "new").chance_of(3) == before


def test_a_lookup_that_is_always_right_becomes_sure():
    calibration = NgramCalibration()
    for index in range(300):
        told(calibration, ONCE, came=3, session=f"s{index}")
    assert considered(calibration, ONCE, "new").chance_of(3) > 0.9


def test_a_session_that_does_not_copy_is_told_from_others_and_forgotten_when_it_closes():
    calibration = NgramCalibration()
    for _ in range(12):
        told(calibration, ONCE, came=8, session="free")
        told(calibration, ONCE, came=3, session="copying")
    free = considered(calibration, ONCE, "free").chance_of(3)
    copying = considered(calibration, ONCE, "copying").chance_of(3)
    assert free < considered(calibration, ONCE, "new").chance_of(3) < copying
    calibration.close(["free", "unknown"])
    assert considered(calibration, ONCE, "free").chance_of(3) > free


def test_chances_come_to_be_what_comes_of_them():
    """Divided texts where 4 comes in half of the cases, 3 in a fifth: within 5 standard errors of 1000 draws."""
    rng = random.Random(3)
    calibration = NgramCalibration()
    for index in range(1000):
        told(calibration, DIVIDED, came=rng.choices((4, 3, 8), weights=(5, 2, 3))[0], session=f"s{index}")
    choices = considered(calibration, DIVIDED, "new")
    assert choices.chance_of(4) == pytest.approx(0.5, abs=0.1)
    assert choices.chance_of(3) == pytest.approx(0.2, abs=0.08)
