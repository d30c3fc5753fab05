"""Sampling of replicas while people watch."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from serve_app.page.routes import PERIOD_S, STALE_S, PageWatch, Sample
from tests.unit.serve_app.page.test_state import TARGET


@dataclass
class Fleet:
    """A target that decides 40 tokens a second."""

    now: float = 0.0
    asked: int = 0

    async def collect(self) -> Sequence[Sample]:
        self.asked += 1
        await asyncio.sleep(0)
        return [replace(TARGET, at_s=self.now, decided_tokens=int(40 * self.now))]

    def watch(self) -> PageWatch:
        return PageWatch("m", self.collect, lambda: self.now)


async def test_however_many_watch_replicas_are_asked_once_a_period() -> None:
    fleet = Fleet()
    watch = fleet.watch()
    states = await asyncio.gather(*(watch.state() for _ in range(50)))
    assert fleet.asked == 1
    assert all(state is states[0] for state in states)
    fleet.now += PERIOD_S
    assert (await watch.state()).tokens_per_s == 40.0
    assert fleet.asked == 2


async def test_who_comes_back_after_a_while_gets_no_rate_of_the_time_between() -> None:
    fleet = Fleet()
    watch = fleet.watch()
    await watch.state()
    fleet.now += STALE_S
    assert (await watch.state()).tokens_per_s is None


async def test_nobody_is_asked_while_nobody_watches() -> None:
    fleet = Fleet()
    fleet.watch()
    await asyncio.sleep(0)
    assert fleet.asked == 0
