"""The watch detects a version with lower acceptance, but tolerates different texts."""

import random

import pytest

from cluster.draft_quality import COMPARED_POSITIONS, HARDER_TEXT_SHARE, LEAST_BLOCKS, LEAST_SESSIONS, VersionWatch

DEPTH = 4
BLOCKS = 20  # per session


def serve(watch: VersionWatch, rng: random.Random, acceptance: float, sessions: int, spread: float = 0.0) -> int:
    """Serves sessions whose acceptance rates vary by `spread`; returns the number of checks that found it worse."""
    found = 0
    for _ in range(sessions):
        name = str(rng.random())
        own = min(1.0, max(0.0, rng.gauss(acceptance, spread)))
        for _ in range(BLOCKS):
            accepted = next((at for at in range(DEPTH) if rng.random() >= own), DEPTH)
            watch.block_verified(name, accepted, DEPTH)
        watch.close(name)
        found += watch.is_worse
    return found


def exchanged(rng: random.Random, acceptance: float, sessions: int, spread: float = 0.0) -> VersionWatch:
    """Returns a watch after sessions of version 0, at the exchange for version 1."""
    watch = VersionWatch()
    assert not serve(watch, rng, acceptance, sessions, spread), "there is nothing to compare with"
    watch.exchanged(1)
    return watch


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.5), (0.7, 0.3), (0.5, 0.0), (0.9, 0.6)])
def test_a_bad_version_is_noticed(before: float, after: float) -> None:
    rng = random.Random(1)
    watch = exchanged(rng, before, 40, spread=0.1)
    assert not serve(watch, rng, after, 3, spread=0.1), "so few sessions prove nothing"
    assert serve(watch, rng, after, 60, spread=0.1) > 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(0.6, 0.6, id="as good"),
        pytest.param(0.5, 0.8, id="better"),
        pytest.param(0.8, 0.72, id="somewhat harder texts"),
        pytest.param(0.0, 0.0, id="always useless"),
    ],
)
def test_a_version_as_good_as_the_last_is_kept(before: float, after: float) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        watch = exchanged(rng, before, 30, spread=0.15)
        assert serve(watch, rng, after, 200, spread=0.15) == 0


def test_at_the_boundary_a_false_alarm_is_rare() -> None:
    """The acceptance is the lowest that counts as good, in 200 runs with 60 checks each."""
    alarms = 0
    for seed in range(200):
        rng = random.Random(seed)
        watch = exchanged(rng, 0.6, 40, spread=0.1)
        alarms += serve(watch, rng, HARDER_TEXT_SHARE * 0.6, 60, spread=0.1) > 0
    assert alarms <= 4


def test_a_longer_block_does_not_look_worse() -> None:
    watch = VersionWatch()
    watch.block_verified("s", accepted=4, depth=4)
    before = watch.summary()["acceptance"]
    watch.exchanged(1)
    watch.block_verified("s", accepted=4, depth=12)
    assert COMPARED_POSITIONS == 4
    assert (watch.summary()["acceptance"], before) == (1.0, 1.0)


@pytest.mark.parametrize(("usual", "needed"), [(1.0, 8), (0.7, 21), (0.3, 88)])
def test_few_blocks_prove_that_a_version_is_useless(usual: float, needed: int) -> None:
    """Targets request almost no blocks of a useless version, at most one per session."""
    watch = exchanged(random.Random(3), usual, 100)
    looks = []
    for session in range(100):
        watch.block_verified(str(session), 0, 1)
        watch.close(str(session))
        looks.append(watch.is_worse)
    assert looks.index(True) + 1 == pytest.approx(needed, rel=0.2)


def test_few_blocks_of_a_good_version_prove_nothing() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        watch = exchanged(rng, 0.6, 40, spread=0.15)
        for session in range(LEAST_BLOCKS - 1):
            watch.block_verified(str(session), int(rng.random() < HARDER_TEXT_SHARE * 0.6), 1)
            assert not watch.is_worse


def test_many_blocks_of_few_sessions_prove_nothing() -> None:
    watch = VersionWatch()
    for version, accepted in ((1, 1), (2, 0)):
        for block in range(10 * LEAST_BLOCKS):
            watch.block_verified(f"s{block % (LEAST_SESSIONS - 1)}", accepted, 1)
        assert not watch.is_worse
        watch.exchanged(version)


def test_open_sessions_count_under_both_versions() -> None:
    watch = VersionWatch()
    names = [f"s{index}" for index in range(LEAST_SESSIONS)]
    for version, accepted in ((1, 1), (2, 0)):
        for name in names * LEAST_BLOCKS:
            watch.block_verified(name, accepted, 1)
        if version == 1:
            watch.exchanged(1)
    assert watch.is_worse
    assert watch.summary() == {
        "version": 1,
        "blocks": LEAST_SESSIONS * LEAST_BLOCKS,
        "acceptance": 0.0,
        "acceptance_before": 1.0,
    }


def test_after_a_rollback_the_version_is_compared_with_the_bad_one() -> None:
    rng = random.Random(2)
    watch = exchanged(rng, 0.7, 40)
    assert serve(watch, rng, 0.2, 40)
    watch.exchanged(0)
    assert not serve(watch, rng, 0.7, 100)
