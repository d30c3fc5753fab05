"""A leaving replica loses no request and no token over real gRPC, and ends once it is empty."""

import asyncio

from tests.integration.harness import Cluster, cluster, eventually, plain_greedy

LONG = 200
DEPARTURES = 4  # more than a session's limit of lost targets


async def a_session_in_mid_stream(c: Cluster) -> "asyncio.Task[list[int]]":
    running = asyncio.create_task(c.tokens(c.generation(max_len=3 + LONG)))
    await eventually(lambda: c.accepted > 0, "it has begun")
    return running


def serving(c: Cluster) -> str:
    """Returns the address of the session's target."""
    (address,) = [name for name, replica in c.targets.items() if replica.scheduler.load()["sessions"]]
    return address


async def test_a_leaving_target_hands_over_its_sessions():
    async with cluster(targets=DEPARTURES + 1) as c:
        running = await a_session_in_mid_stream(c)
        for _ in range(DEPARTURES):
            await eventually(lambda: any(one.scheduler.load()["sessions"] for one in c.targets.values()), "it is open")
            await asyncio.wait_for(c.targets[serving(c)].leave(within_s=30), 10)
        c.hurry()
        assert await running == plain_greedy((1, 2, 3), LONG)
        assert c.router.sessions.handovers == {("target", "planned"): DEPARTURES}


async def test_the_only_target_finishes_its_sessions_before_leaving():
    async with cluster() as c:
        running = await a_session_in_mid_stream(c)
        leaving = asyncio.create_task(c.targets[serving(c)].leave(within_s=30))
        await asyncio.sleep(0)
        c.hurry()
        assert await running == plain_greedy((1, 2, 3), LONG)
        await asyncio.wait_for(leaving, 10)
        assert c.router.sessions.handovers == {}


async def test_sessions_left_after_the_drain_time_move_to_another_target():
    """The router sees the other target as down until the first has left."""
    async with cluster(targets=2) as c:
        running = await a_session_in_mid_stream(c)
        left = serving(c)
        (other,) = c.targets.keys() - {left}
        c.router.sessions.targets.down(other)
        await c.targets[left].leave(within_s=0)
        c.hurry()
        assert await running == plain_greedy((1, 2, 3), LONG)
        assert c.router.sessions.handovers == {("target", "planned"): 1}


async def test_a_leaving_drafter_hands_over_its_sessions():
    async with cluster(drafters=2) as c:
        running = await a_session_in_mid_stream(c)
        (drafter,) = [one for one in c.drafters.values() if one.scheduler.load()["sessions"]]
        (other,) = [one for one in c.drafters.values() if one is not drafter]
        await asyncio.wait_for(drafter.leave(within_s=30), 10)
        await eventually(lambda: other.scheduler.counts["blocks_in_time"] > 0, "the other one drafts")
        c.hurry()
        assert await running == plain_greedy((1, 2, 3), LONG)
        assert c.router.sessions.handovers == {("drafter", "planned"): 1}


async def test_the_only_drafter_drafts_until_it_ends():
    async with cluster() as c:
        running = await a_session_in_mid_stream(c)
        (drafter,) = c.drafters.values()
        await drafter.leave(within_s=0)
        before = drafter.scheduler.counts["blocks_in_time"]
        await eventually(lambda: drafter.scheduler.counts["blocks_in_time"] > before, "it goes on")
        c.hurry()
        assert await running == plain_greedy((1, 2, 3), LONG)
