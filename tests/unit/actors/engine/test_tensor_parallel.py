"""Tests that waiting for tensor-parallel ranks ends with the first ended rank. Futures replace ranks."""

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.attention.select_backend import AttentionReport
from actors.engine.tensor_parallel import (
    RankGroup,
    RankReport,
    or_rank_failure,
    raise_when_any_ends,
)
from actors.models.weights import LoadReport
from cluster.costs import ForwardCost
from cluster.errors import EngineError


@pytest.fixture
async def ranks() -> list[asyncio.Future[None]]:
    loop = asyncio.get_running_loop()
    return [loop.create_future(), loop.create_future()]


async def test_the_first_rank_that_dies_is_an_error(ranks: list[asyncio.Future[None]]) -> None:
    ranks[1].set_exception(RayError("killed"))
    with pytest.raises(EngineError, match=r"a tensor-parallel rank failed: .*killed"):
        await raise_when_any_ends(ranks)


async def test_a_rank_that_just_ends_is_an_error(ranks: list[asyncio.Future[None]]) -> None:
    ranks[0].set_result(None)
    with pytest.raises(EngineError, match="a tensor-parallel rank has ended"):
        await raise_when_any_ends(ranks)


async def test_a_result_is_returned_while_all_ranks_run(ranks: list[asyncio.Future[None]]) -> None:
    async def measure() -> str:
        await asyncio.sleep(0)
        return "measured"

    assert await or_rank_failure(measure(), ranks) == "measured"
    assert await or_rank_failure(measure(), []) == "measured"


async def test_a_rank_blocked_on_a_dead_one_does_not_block_the_group(ranks: list[asyncio.Future[None]]) -> None:
    for_ever: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ranks[0].set_exception(RayError("killed"))
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match="killed"):
            await or_rank_failure(for_ever, ranks)


async def test_a_failure_while_ranks_run_is_raised_unchanged(ranks: list[asyncio.Future[None]]) -> None:
    failing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    failing.set_exception(MemoryError("too large"))
    with pytest.raises(MemoryError, match="too large"):
        await or_rank_failure(failing, ranks)


class SilentChannel:
    """Channel that never answers."""

    def call(self, message: Any) -> Any:
        return asyncio.get_running_loop().create_future()


class Running:
    """Rank's work as a Ray reference, awaitable by any number of callers."""

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.get_running_loop().create_future().__await__()


async def test_a_rank_that_never_compiles_a_grammar_is_the_end_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's clock is accelerated."""
    loop = asyncio.get_running_loop()
    usual = loop.time
    looks = iter(range(1_000_000))
    monkeypatch.setattr(loop, "time", lambda: usual() + next(looks))
    silent: Any = SilentChannel()
    reports = [RankReport(1, 8, LoadReport(0.0, 0, 0), AttentionReport("gathered"))]
    group = RankGroup([], reports, ForwardCost.linear(0.0), silent, silent, [Running()])
    watching = asyncio.create_task(group.watch())
    for _ in range(2):  # the second attempt finds the engine failed
        with pytest.raises(EngineError, match="a rank has not compiled a grammar within"):
            await group.prepare("root ::= 'a'")
    with pytest.raises(EngineError, match="a rank has not compiled a grammar"):
        await watching
