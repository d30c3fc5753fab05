"""The coordinator's side of ranks that answer nothing, with no rank behind it."""

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from actors.attention.select_backend import AttentionReport
from actors.engine import tensor_parallel
from actors.engine.tensor_parallel import RankGroup, RankReport
from actors.models.weights import LoadReport
from cluster.costs import ForwardCost
from cluster.errors import EngineError


class Silent:
    """A channel on which nothing is ever answered."""

    async def call(self, message: Any) -> Any:
        await asyncio.get_running_loop().create_future()


class Running:
    """A rank's work as a Ray reference, which any number of callers may await."""

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.get_running_loop().create_future().__await__()


async def test_a_rank_that_never_compiles_a_grammar_is_the_end_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "PREPARE_S", 1e-9)
    silent: Any = Silent()
    reports = [RankReport(1, 8, LoadReport(0.0, 0, 0), AttentionReport("gathered"))]
    group = RankGroup([], reports, ForwardCost.linear(0.0), silent, silent, [Running()])
    watching = asyncio.create_task(group.watch())
    for _ in range(2):  # the second one finds it so
        with pytest.raises(EngineError, match="a rank has not compiled a grammar within 1e-09 s"):
            await group.prepare("root ::= 'a'")
    with pytest.raises(EngineError, match="a rank has not compiled a grammar"):
        await watching
