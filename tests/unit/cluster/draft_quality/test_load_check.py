"""A new drafter with an acceptance rate far below the expected one logs a warning with the expected rate."""

import random

import pytest

from cluster.draft_quality import LoadCheck


def seen(check: LoadCheck, confidence: float, chance: float, seed: int = 0) -> LoadCheck:
    """Returns the finished check of a draft with this acceptance probability."""
    rng = random.Random(seed)
    while not check.is_over:
        check = check.after(confidence, rng.random() < chance)
    return check


def test_a_draft_is_compared_with_its_own_confidence():
    bad = seen(LoadCheck(), confidence=0.8, chance=0.1)
    assert bad.expected == pytest.approx(0.8)
    assert bad.warning is not None
    assert "but its own confidence predicts 80 %" in bad.warning
    for cause in ("tokenizer", "chat template", "another target", "dtype", "RoPE", "quantization", "damaged weights"):
        assert cause in bad.warning


def test_a_published_figure_outranks_confidence():
    bad = seen(LoadCheck(published=0.7), confidence=0.05, chance=0.1)
    assert bad.expected == 0.7
    assert bad.warning is not None
    assert "but the rate published in its folder predicts 70 %" in bad.warning
    assert seen(LoadCheck(published=0.4), confidence=0.95, chance=0.4).warning is None


def test_a_draft_that_is_always_in_doubt_causes_a_warning():
    assert seen(LoadCheck(), confidence=0.0001, chance=0.0).warning is not None


def test_a_check_warns_only_at_its_end_and_does_not_change_after_it():
    check = LoadCheck()
    assert (check.expected, check.reached) == (None, None)
    while not check.is_over:
        assert check.warning is None
        check = check.after(0.8, False)
    assert 16 < check.tokens < 1000
    assert check.warning is not None
    assert check.after(0.8, True) == check


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_a_draft_as_good_as_its_confidence_rarely_causes_a_warning_and_one_at_a_quarter_nearly_always(chance):
    blamed = [seen(LoadCheck(), chance, chance, seed).warning is not None for seed in range(2000)]
    missed = [seen(LoadCheck(), chance, chance / 4, seed).warning is None for seed in range(2000)]
    assert sum(blamed) <= 0.01 * len(blamed)
    assert sum(missed) <= 0.05 * len(missed)
