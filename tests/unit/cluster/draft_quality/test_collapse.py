"""A session whose blocks become bad is detected from few blocks, and rarely by mistake."""

import random

import pytest

from cluster.draft_quality import CollapseWatch


def collapses(seed: int, *spells: tuple[float, int]) -> list[int]:
    """Returns the block counts at which a collapse was detected, given shares of good blocks over time."""
    rng = random.Random(seed)
    watch = CollapseWatch()
    chances = [chance for chance, blocks in spells for _ in range(blocks)]
    return [count for count, chance in enumerate(chances, 1) if watch.block_verified(rng.random() < chance)]


def test_a_session_whose_blocks_are_all_rejected_is_detected_within_few_blocks():
    for chance, most in ((0.9, 12), (0.8, 12), (0.5, 40)):
        for seed in range(50):
            first, *_ = collapses(seed, (chance, 100), (0.0, 60))
            assert 100 < first <= 100 + most


def test_a_few_tokens_accepted_by_chance_delay_detection_only():
    found = [collapses(seed, (0.8, 100), (0.05, 100)) for seed in range(50)]
    assert all(each and each[0] < 150 for each in found)


@pytest.mark.parametrize("chance", [0.95, 0.8, 0.5, 0.3, 0.1])
def test_constant_acceptance_rarely_counts_as_a_collapse(chance):
    """Each mistake costs a prefill of the session."""
    assert sum(len(collapses(seed, (chance, 1000))) for seed in range(100)) <= 100 * 1000 * 2e-4


def test_a_drafter_that_was_never_good_is_not_out_of_step():
    assert collapses(0, (0.0, 1000)) == []


def test_after_a_collapse_the_session_must_have_good_blocks_before_the_next():
    """A drafter that stays bad is not asked to reopen the session again and again."""
    assert len(collapses(1, (0.8, 100), (0.0, 500))) == 1
    assert len(collapses(1, (0.8, 100), (0.0, 50), (0.8, 100), (0.0, 50))) == 2
