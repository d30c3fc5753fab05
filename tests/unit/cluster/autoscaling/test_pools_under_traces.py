"""Under traces of arrivals, each pool follows its demand up and down."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.unit.cluster.autoscaling.pool_world import Costs, PoolWorld, draft_pool, target_pool

SLOW_DRAFTS = Costs(pass_row_s=0.008)  # one drafter keeps up with about six sessions
SLOW_STEPS = Costs(step_s=0.05, step_row_s=0.002)


def step_of(low: float, high: float, begins: int, ends: int) -> Callable[[int], float]:
    return lambda now: high if begins <= now < ends else low


def changes(sizes: list[int]) -> int:
    return sum(later != earlier for earlier, later in pairwise(sizes))


def test_slow_drafting_grows_only_the_draft_pool() -> None:
    world = PoolWorld(target_pool(max_sessions=64), draft_pool(), SLOW_DRAFTS)
    world.run(1800, step_of(0.2, 2.5, 100, 700))
    assert max(world.targets.sizes) == 1
    assert max(world.drafters.sizes[100:700]) >= 3
    assert world.drafters.sizes[-1] == 1, "and return"


def test_slow_targets_grow_only_the_target_pool() -> None:
    world = PoolWorld(target_pool(max_sessions=16), draft_pool(max_sessions=256), SLOW_STEPS)
    world.run(2400, step_of(0.2, 5.0, 100, 700))
    assert max(world.drafters.sizes) == 1
    assert max(world.targets.sizes[100:700]) >= 3
    assert world.targets.sizes[-1] == 1, "and return"
    assert world.sessions < 10, "what had queued was served"


def test_without_speculation_the_draft_pool_stays_at_its_minimum() -> None:
    world = PoolWorld(target_pool(max_sessions=64), draft_pool(), SLOW_DRAFTS)
    world.run(600, lambda _: 4.0)
    assert world.drafters.size >= 3
    world.speculates = False
    world.run(400, lambda _: 4.0)
    assert world.drafters.size == 1


def test_an_empty_draft_pool_serves_without_drafts_and_grows_again() -> None:
    world = PoolWorld(target_pool(), draft_pool(least=0), Costs())
    world.run(400, lambda _: 0.0)
    assert world.drafters.size == 0
    world.run(15, lambda _: 1.0)
    assert world.drafters.running == 0
    assert world.finished > 0, "nobody waits for drafters"
    world.run(60, lambda _: 1.0)
    assert world.drafters.running == 1
    world.run(600, lambda _: 0.0)
    assert world.drafters.size == 0


def test_refused_sessions_grow_the_draft_pool() -> None:
    """Passes are cheap but slots are few, so an overloaded drafter refuses sessions beyond its slots."""
    world = PoolWorld(target_pool(max_sessions=64), draft_pool(max_sessions=4), Costs())
    world.run(300, lambda _: 3.0)
    assert world.drafters.size * 2 >= 0.9 * world.sessions, "two sessions of four places each"


def test_the_draft_pool_does_not_grow_without_benefit() -> None:
    """Passes take too long even for one session, so a further drafter would not make blocks timely."""
    world = PoolWorld(target_pool(max_sessions=64), draft_pool(), Costs(pass_s=0.15, pass_row_s=0.0))
    world.run(600, lambda _: 2.0)
    assert max(world.drafters.sizes) == 1


@pytest.mark.parametrize("rate", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
@pytest.mark.parametrize("costs", [SLOW_DRAFTS, SLOW_STEPS], ids=["slow drafts", "slow steps"])
def test_noise_changes_no_size_for_long(rate: float, costs: Costs) -> None:
    """During an hour of random arrivals at a constant rate, a settled pool changes its size only a few times."""
    world = PoolWorld(target_pool(most=8), draft_pool(most=16), costs)
    world.run(3600, lambda _: rate)
    assert changes(world.targets.sizes[900:]) <= 4
    assert changes(world.drafters.sizes[900:]) <= 4


def test_a_coupled_draft_pool_follows_the_target_pool() -> None:
    world = PoolWorld(target_pool(max_sessions=16), draft_pool(least=0, per_target=2.0), SLOW_STEPS)
    world.run(700, lambda _: 5.0)
    assert world.targets.size >= 3
    assert world.drafters.size == min(8, 2 * world.targets.size)


def test_a_gain_from_speculation_shrinks_the_target_pool() -> None:
    """The test runs the same load with and without drafts, at a target of half of the slots free."""
    sizes = {}
    for accepted in (0.0, 1.5):
        world = PoolWorld(target_pool(max_sessions=16), draft_pool(), Costs(step_s=0.05, accepted=accepted))
        world.run(900, lambda _: 1.5)
        sizes[accepted] = world.targets.size
    assert sizes[1.5] < sizes[0.0]
