"""The check of a drafter that has just begun: what is far below expectation is named, whatever promised it."""

import random

import pytest

from cluster.draft_quality import TOKENS, LoadCheck


def seen(check: LoadCheck, confidence: float, chance: float, seed: int = 0, tokens: int = TOKENS) -> LoadCheck:
    rng = random.Random(seed)
    for _ in range(tokens):
        check = check.after(confidence, rng.random() < chance)
    return check


def test_a_draft_is_held_to_its_own_confidence():
    bad = seen(LoadCheck(), confidence=0.8, chance=0.1)
    assert bad.expected == pytest.approx(0.8)
    assert bad.warning is not None
    assert "where its own confidence promises 80 %" in bad.warning
    for cause in ("tokenizer", "chat template", "another target", "dtype", "RoPE", "quantisation", "damaged weights"):
        assert cause in bad.warning


def test_a_figure_in_the_folder_outranks_confidence():
    bad = seen(LoadCheck(published=0.7), confidence=0.05, chance=0.1)
    assert bad.expected == 0.7
    assert bad.warning is not None
    assert "where the figure in its folder promises 70 %" in bad.warning
    assert seen(LoadCheck(published=0.4), confidence=0.95, chance=0.4).warning is None


def test_a_draft_in_doubt_everywhere_is_damaged_too():
    assert seen(LoadCheck(), confidence=0.0001, chance=0.0).warning is not None


def test_it_says_nothing_before_it_is_over_and_changes_nothing_after_it():
    early = seen(LoadCheck(), 0.8, 0.0, tokens=TOKENS - 1)
    assert (early.is_over, early.warning) == (False, None)
    done = early.after(0.8, False)
    assert done.is_over
    assert done.after(0.8, True) == done
    assert (LoadCheck().expected, LoadCheck().reached) == (None, None)


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_a_draft_as_good_as_it_thinks_is_hardly_ever_blamed_and_one_at_a_quarter_hardly_ever_missed(chance):
    blamed = [seen(LoadCheck(), chance, chance, seed).warning is not None for seed in range(2000)]
    missed = [seen(LoadCheck(), chance, chance / 4, seed).warning is None for seed in range(2000)]
    assert sum(blamed) <= 0.01 * len(blamed)
    assert sum(missed) <= 0.05 * len(missed)
