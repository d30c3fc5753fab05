"""Tests the sampling of replicas while the page is open."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.learning.trainer import TrainerStatus
from serve_app.page.routes import PageWatch, Sample, TrainerSample
from tests.unit.serve_app.page.test_state import TARGET


@dataclass
class Fleet:
    """Fleet of one target with 40 tokens per second."""

    now: float = 0.0
    asked: int = 0
    training: TrainerStatus | None = None  # the trainer's answer; None: busy

    async def collect(self) -> Sequence[Sample]:
        self.asked += 1
        await asyncio.sleep(0)
        target = replace(TARGET, at_s=self.now, committed_tokens=int(40 * self.now))
        return [target, *([] if self.training is None else [TrainerSample("trainer", self.training)])]

    def watch(self) -> PageWatch:
        return PageWatch("m", self.collect, lambda: self.now)


async def test_all_viewers_share_one_round_of_samples() -> None:
    fleet = Fleet()
    watch = fleet.watch()
    states = await asyncio.gather(*(watch.state() for _ in range(50)))
    assert fleet.asked == 1
    assert all(state is states[0] for state in states)
    fleet.now += 2.0
    assert (await watch.state()).tokens_per_s == 40.0
    assert fleet.asked == 2


async def test_no_rate_over_a_long_gap() -> None:
    fleet = Fleet()
    watch = fleet.watch()
    await watch.state()
    fleet.now += 60.0
    assert (await watch.state()).tokens_per_s is None


async def test_no_samples_without_viewers() -> None:
    fleet = Fleet()
    fleet.watch()
    await asyncio.sleep(0)
    assert fleet.asked == 0


async def test_a_busy_trainer_is_shown_as_it_was_when_it_last_answered() -> None:
    fleet = Fleet()
    watch = fleet.watch()
    assert (await watch.state()).learning is None
    idle = TrainerStatus("waiting", 10, 10, version=0, progress=None, counts={}, training_s=0.0)
    shown = []
    for fleet.training in (idle, None, None, replace(idle, phase="training"), None):
        fleet.now += 60.0
        state = await watch.state()
        assert state.learning is not None
        shown.append(state.learning.phase)
    assert shown == ["waiting", "waiting", "waiting", "training", "training"]
