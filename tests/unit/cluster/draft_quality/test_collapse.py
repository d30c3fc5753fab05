"""Steps after blocks became bad: one after the other, each on new evidence."""

import random
from collections.abc import Iterable
from itertools import pairwise

from cluster.draft_quality import MOST_SUSPECTS, RECENT, CollapseWatch, Suspects
from cluster.speculation.estimators import Mean
from protos.messages import Collapse

STEPS = 3  # of the ladder: begun anew, replaced, plain


def after(watch: CollapseWatch, blocks: Iterable[int]) -> CollapseWatch:
    for accepted in blocks:
        watch = watch.after(accepted)
    return watch


def collapses(seed: int, *spells: tuple[float, int]) -> list[tuple[int, Collapse]]:
    """Returns the blocks of a session after which a collapse was reported; later drafters are no better."""
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


def test_every_step_takes_evidence_of_its_own_against_the_same_history():
    found = [collapses(seed, (0.8, 150), (0.05, 150)) for seed in range(200)]
    assert {len(each) for each in found} == {STEPS}, "a drafter that stays bad is found three times"
    for each in found:
        ends = [150, *(count for count, _ in each)]
        assert min(later - earlier for earlier, later in pairwise(ends)) > 3
        assert [collapse.is_resynced for _, collapse in each] == [False, True, True]
        assert all(collapse.usual > 0.6 > 0.4 > collapse.latest for _, collapse in each)


def test_a_session_whose_blocks_are_as_good_as_ever_hardly_ever_loses_its_drafter():
    """200 000 blocks at each acceptance: no session goes all the way, and none of the steps is taken often."""
    for chance in (0.95, 0.8, 0.5, 0.3):
        steps = [len(collapses(seed, (chance, 1000))) for seed in range(200)]
        assert sum(steps) <= 200 * 1000 * 1e-4
        assert STEPS not in steps


def test_a_drafter_that_is_good_again_after_it_began_anew_keeps_the_session():
    watch = after(CollapseWatch(), [1] * 50)
    while watch.collapse is None:
        watch = watch.after(0)
    assert not watch.collapse.is_resynced
    watch = after(watch.reported().attached(), [1, 1, 0, 1] * 50)
    assert watch.collapse is None


def test_until_a_drafter_attaches_again_blocks_prove_nothing():
    """Those of before may still be on their way."""
    watch = after(CollapseWatch(), [1] * 50)
    while watch.collapse is None:
        watch = watch.after(0)
    waiting = watch.reported()
    assert after(waiting, [0] * 100) == waiting
    assert after(waiting.attached(), [0] * 100).collapse is not None


def test_a_new_session_of_a_bad_drafter_falls_short_of_what_the_drafter_was():
    suspects = Suspects()
    assert suspects.usual("d") is None
    suspects.collapsed("d", Mean(100, 0.8))
    begun = CollapseWatch().attached(suspects.usual("d"))
    assert after(begun, [0] * 40).collapse is not None
    assert after(CollapseWatch().attached(None), [0] * 40).collapse is None, "it never was better"


def test_a_session_with_a_history_of_its_own_keeps_it():
    own = after(CollapseWatch(), [1, 0] * 50)
    assert own.attached(Mean(100, 0.95)).drift.history == own.drift.history


def test_a_drafter_is_suspected_until_it_is_good_again():
    suspects = Suspects()
    suspects.collapsed("d", Mean(100, 0.8))
    for _ in range(10 * RECENT):
        suspects.block("d", 0)
    assert suspects.usual("d") is not None
    for _ in range(2 * RECENT):
        suspects.block("d", 2)
    assert suspects.usual("d") is None
    suspects.block("d", 0)
    assert suspects.usual("d") is None


def test_few_good_blocks_do_not_clear_a_drafter():
    suspects = Suspects()
    suspects.collapsed("d", Mean(100, 0.8))
    for _ in range(RECENT - 1):
        suspects.block("d", 1)
    assert suspects.usual("d") is not None


def test_so_many_suspects_are_remembered():
    suspects = Suspects()
    for index in range(MOST_SUSPECTS + 1):
        suspects.collapsed(f"d{index}", Mean(100, 0.8))
    assert suspects.usual("d0") is None
    assert suspects.usual("d1") is not None
