"""After blocks become bad, remedies follow one after another, each on new evidence."""

import random
from collections.abc import Iterable
from itertools import pairwise

from cluster.draft_quality import CollapseWatch, Suspects
from cluster.speculation.estimators import Mean
from protos.messages import Collapse

STEPS = 3  # remedies: resynchronized, replaced, non-speculative


def after(watch: CollapseWatch, blocks: Iterable[int]) -> CollapseWatch:
    for accepted in blocks:
        watch = watch.after(accepted)
    return watch


def collapses(seed: int, *spells: tuple[float, int]) -> list[tuple[int, Collapse]]:
    """Returns the block counts at which collapses were reported, if later drafters are no better."""
    rng = random.Random(seed)
    watch = CollapseWatch()
    found = []
    chances = [chance for chance, blocks in spells for _ in range(blocks)]
    for count, chance in enumerate(chances, 1):
        watch = watch.after(rng.random() < chance)
        if watch.collapse is not None:
            found.append((count, watch.collapse))
            watch = watch.reported().attached()
        if len(found) == STEPS:
            break
    return found


def test_every_remedy_needs_new_evidence_against_the_same_history():
    found = [collapses(seed, (0.8, 150), (0.05, 150)) for seed in range(200)]
    assert {len(each) for each in found} == {STEPS}, "a drafter that stays bad is detected three times"
    for each in found:
        ends = [150, *(count for count, _ in each)]
        assert min(later - earlier for earlier, later in pairwise(ends)) > 3
        assert [collapse.is_resynced for _, collapse in each] == [False, True, True]
        assert all(collapse.usual > 0.6 > 0.4 > collapse.latest for _, collapse in each)


def test_a_session_with_unchanged_acceptance_rarely_loses_its_drafter():
    """In 200 000 blocks at each acceptance rate, no session reaches the last remedy."""
    for chance in (0.95, 0.8, 0.5, 0.3):
        steps = [len(collapses(seed, (chance, 1000))) for seed in range(200)]
        assert sum(steps) <= 200 * 1000 * 1e-4
        assert STEPS not in steps


def test_a_drafter_that_recovers_after_a_resync_keeps_the_session():
    watch = after(CollapseWatch(), [1] * 50)
    while watch.collapse is None:
        watch = watch.after(0)
    assert not watch.collapse.is_resynced
    watch = after(watch.reported().attached(), [1, 1, 0, 1] * 50)
    assert watch.collapse is None


def test_blocks_count_only_once_a_drafter_has_attached_again():
    """Earlier blocks may still be in flight."""
    watch = after(CollapseWatch(), [1] * 50)
    while watch.collapse is None:
        watch = watch.after(0)
    waiting = watch.reported()
    assert after(waiting, [0] * 100) == waiting
    assert after(waiting.attached(), [0] * 100).collapse is not None


def test_a_new_session_is_compared_with_the_drafters_earlier_acceptance():
    suspects = Suspects()
    assert suspects.usual("d") is None
    suspects.collapsed("d", Mean(100, 0.8))
    begun = CollapseWatch().attached(suspects.usual("d"))
    assert after(begun, [0] * 40).collapse is not None
    assert after(CollapseWatch().attached(None), [0] * 40).collapse is None, "it was never better"


def test_a_session_keeps_its_own_history():
    own = after(CollapseWatch(), [1, 0] * 50)
    assert own.attached(Mean(100, 0.95)).drift.history == own.drift.history


def test_a_drafter_is_suspected_until_its_blocks_are_good_again():
    suspects = Suspects()
    suspects.collapsed("d", Mean(100, 0.8))
    for _ in range(300):
        suspects.block("d", 0)
    assert suspects.usual("d") is not None
    for _ in range(100):
        suspects.block("d", 2)
    assert suspects.usual("d") is None
    suspects.block("d", 0)
    assert suspects.usual("d") is None


def test_a_few_good_blocks_do_not_clear_a_drafter():
    suspects = Suspects()
    suspects.collapsed("d", Mean(100, 0.8))
    for _ in range(5):
        suspects.block("d", 1)
    assert suspects.usual("d") is not None


def test_only_the_latest_suspects_are_kept():
    suspects = Suspects()
    for index in range(1000):
        suspects.collapsed(f"d{index}", Mean(100, 0.8))
    assert suspects.usual("d0") is None
    assert suspects.usual("d999") is not None
