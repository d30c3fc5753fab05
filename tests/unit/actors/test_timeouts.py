"""Waiting with a limit, on an event loop whose clock the test sets."""

import asyncio

import pytest

from actors.engine.executor import LOOK_S, done_within


@pytest.fixture
async def stands_still(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Yields a list; the loop stands still once for each appended duration."""
    stops: list[float] = []
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + sum(stops))
    return stops


async def test_what_is_done_in_time_is() -> None:
    assert await done_within(1e6, asyncio.ensure_future(asyncio.sleep(0)))


async def test_what_is_never_done_is_given_up() -> None:
    work = asyncio.get_running_loop().create_future()
    assert not await done_within(0.0, work)
    assert not work.cancelled(), "whose it is may cancel it"


async def test_what_comes_soon_after_a_stop_has_come_in_time(stands_still: list[float]) -> None:
    async def answer() -> None:
        stands_still.append(1e6)
        for _ in range(10):  # until it is read
            await asyncio.sleep(0)

    assert await done_within(2 * LOOK_S, asyncio.ensure_future(answer()))


async def test_what_hangs_is_given_up_after_its_limit(stands_still: list[float]) -> None:
    work = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(done_within(10 * LOOK_S, work))
    while not waiting.done():
        stands_still.append(LOOK_S / 10)
        await asyncio.sleep(0)
    assert not waiting.result()
    assert 10 * LOOK_S <= sum(stands_still) <= 15 * LOOK_S
