"""The policy under traces of arrivals: each pool follows what is asked of it, and comes back."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.unit.cluster.autoscaling.pool_world import Costs, PoolWorld, draft_pool, target_pool

SLOW_DRAFTS = Costs(pass_row_s=0.008)  # one drafter follows some six sessions
SLOW_STEPS = Costs(step_s=0.05, step_row_s=0.002)


def step_of(low: float, high: float, begins: int, ends: int) -> Callable[[int], float]:
    return lambda now: high if begins <= now < ends else low


def changes(sizes: list[int]) -> int:
    return sum(later != earlier for earlier, later in pairwise(sizes))


def test_drafters_alone_grow_where_drafting_cannot_follow() -> None:
    world = PoolWorld(target_pool(max_sessions=64), draft_pool(), SLOW_DRAFTS)
    world.run(1800, step_of(0.2, 2.5, 100, 700))
    assert max(world.targets.sizes) == 1
    assert max(world.drafters.sizes[100:700]) >= 3
    assert world.drafters.sizes[-1] == 1, "and return"


def test_targets_alone_grow_where_they_cannot_follow() -> None:
    world = PoolWorld(target_pool(max_sessions=16), draft_pool(max_sessions=256), SLOW_STEPS)
    world.run(2400, step_of(0.2, 5.0, 100, 700))
    assert max(world.drafters.sizes) == 1
    assert max(world.targets.sizes[100:700]) >= 3
    assert world.targets.sizes[-1] == 1, "and return"
    assert world.sessions < 10, "what had queued was served"


def test_without_speculation_there_are_no_more_drafters_than_must_be() -> None:
    world = PoolWorld(target_pool(max_sessions=64), draft_pool(), SLOW_DRAFTS)
    world.run(600, lambda _: 4.0)
    assert world.drafters.size >= 3
    world.speculates = False
    world.run(400, lambda _: 4.0)
    assert world.drafters.size == 1


def test_a_pool_of_no_drafters_serves_plainly_and_comes_back() -> None:
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


def test_drafters_that_turn_sessions_away_become_more() -> None:
    """Cheap passes, but few places: an overloaded drafter has the sessions that it can serve, and no more."""
    world = PoolWorld(target_pool(max_sessions=64), draft_pool(max_sessions=4), Costs())
    world.run(300, lambda _: 3.0)
    assert world.drafters.size * 2 >= 0.9 * world.sessions, "two sessions of four places each"


def test_drafters_are_not_added_where_they_cannot_help() -> None:
    """Passes take too long, but no less for one session than for many: each would be as late alone on a drafter."""
    world = PoolWorld(target_pool(max_sessions=64), draft_pool(), Costs(pass_s=0.15, pass_row_s=0.0))
    world.run(600, lambda _: 2.0)
    assert max(world.drafters.sizes) == 1


@pytest.mark.parametrize("rate", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
@pytest.mark.parametrize("costs", [SLOW_DRAFTS, SLOW_STEPS], ids=["slow drafts", "slow steps"])
def test_noise_moves_nothing_for_long(rate: float, costs: Costs) -> None:
    """An hour of random arrivals at one rate: once it has settled, a pool changes its mind a few times at most."""
    world = PoolWorld(target_pool(most=8), draft_pool(most=16), costs)
    world.run(3600, lambda _: rate)
    assert changes(world.targets.sizes[900:]) <= 4
    assert changes(world.drafters.sizes[900:]) <= 4


def test_a_coupled_draft_pool_follows_the_target_pool() -> None:
    world = PoolWorld(target_pool(max_sessions=16), draft_pool(least=0, per_target=2.0), SLOW_STEPS)
    world.run(700, lambda _: 5.0)
    assert world.targets.size >= 3
    assert world.drafters.size == min(8, 2 * world.targets.size)


def test_targets_need_fewer_replicas_with_what_speculation_brings() -> None:
    """The same load, with and without drafts; half of the sessions' places are to be free."""
    sizes = {}
    for accepted in (0.0, 1.5):
        world = PoolWorld(target_pool(max_sessions=16), draft_pool(), Costs(step_s=0.05, accepted=accepted))
        world.run(900, lambda _: 1.5)
        sizes[accepted] = world.targets.size
    assert sizes[1.5] < sizes[0.0]
