"""Waiting for ranks ends with the first rank that ends; futures stand for ranks."""

import asyncio

import pytest
from ray.exceptions import RayError

from actors.engine.tensor_parallel import first_to_end, while_running
from cluster.errors import EngineError


@pytest.fixture
async def ranks() -> list[asyncio.Future[None]]:
    loop = asyncio.get_running_loop()
    return [loop.create_future(), loop.create_future()]


async def test_the_first_rank_that_dies_is_an_error(ranks: list[asyncio.Future[None]]) -> None:
    ranks[1].set_exception(RayError("killed"))
    with pytest.raises(EngineError, match=r"a tensor-parallel rank failed: .*killed"):
        await first_to_end(ranks)


async def test_a_rank_that_just_ends_is_an_error(ranks: list[asyncio.Future[None]]) -> None:
    ranks[0].set_result(None)
    with pytest.raises(EngineError, match="a tensor-parallel rank has ended"):
        await first_to_end(ranks)


async def test_what_is_done_while_all_ranks_run_is_given(ranks: list[asyncio.Future[None]]) -> None:
    async def measure() -> str:
        await asyncio.sleep(0)
        return "measured"

    assert await while_running(measure(), ranks) == "measured"
    assert await while_running(measure(), []) == "measured"


async def test_nobody_waits_for_a_rank_that_waits_for_one_that_died(ranks: list[asyncio.Future[None]]) -> None:
    for_ever: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ranks[0].set_exception(RayError("killed"))
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match="killed"):
            await while_running(for_ever, ranks)


async def test_what_fails_while_ranks_run_raises_as_it_does(ranks: list[asyncio.Future[None]]) -> None:
    failing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    failing.set_exception(MemoryError("too large"))
    with pytest.raises(MemoryError, match="too large"):
        await while_running(failing, ranks)
