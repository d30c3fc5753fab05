"""Tests tensor-parallel ranks: the leader's messages, and waiting that ends with the first ended rank.

Futures replace ranks, and a list replaces the wire.
"""

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayError

from actors.attention.select_backend import AttentionReport
from actors.compute.kv_cache import InputRow
from actors.engine.tensor_parallel import (
    RankGroup,
    RankReport,
    from_tensor,
    or_rank_failure,
    raise_when_any_ends,
    receive_step,
    send_step,
    to_tensor,
)
from actors.models.weights import LoadReport
from cluster.costs import ForwardCost
from cluster.errors import EngineError
from cluster.page_allocator import PageCopy, SlotMove

ids = st.integers(0, 2**31 - 1)
tuples = st.lists(ids, max_size=6).map(tuple)
rows = st.builds(
    InputRow,
    tokens=tuples,
    start=ids,
    logits=ids,
    pages=tuples,
    parents=st.lists(st.integers(-1, 127), max_size=6).map(tuple),
)
CPU = torch.device("cpu")


copied = st.lists(st.builds(PageCopy, ids, ids), max_size=4)
moved = st.lists(st.builds(SlotMove, ids, ids), max_size=4)


@given(st.lists(rows, max_size=5), copied, moved, st.integers(0, 9))
def test_a_step_round_trips_before_padding(step, copies, moves, padding):
    tensor = to_tensor(step, copies, moves)
    assert tensor.dtype is torch.int32
    assert int(tensor[0]) == len(tensor)
    assert from_tensor(torch.cat([tensor, torch.full((padding,), 7, dtype=torch.int32)])) == (step, copies, moves)


class Wire:
    """Both ends of a group of two ranks."""

    size = 2

    def __init__(self) -> None:
        self.rank = 0
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))  # fails unless shapes match


def test_a_step_of_any_length_is_sent_whole_and_short_ones_in_one_message():
    """Steps are shorter than a message, exactly one message, one number longer, and much longer."""
    wire = Wire()
    send_step(to_tensor([], []), wire, CPU)
    size = len(wire.sent.pop())
    for length in (13, size - 1, size, size + 1, 3 * size):
        step = [InputRow(tuple(range(length - 10)), 5, 1, (9,))]  # 10 numbers besides the tokens
        numbers = to_tensor(step, [])
        assert len(numbers) == length
        wire.rank = 0
        send_step(numbers, wire, CPU)
        assert len(wire.sent) == (1 if length <= size else 2)
        assert len(wire.sent[0]) == size
        wire.rank = 1
        assert from_tensor(receive_step(wire, CPU)) == (step, [], [])
        assert not wire.sent


# ---------------------------------------------------------------- waiting


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
