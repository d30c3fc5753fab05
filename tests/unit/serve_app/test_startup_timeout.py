"""A hanging start ends with an error that states the remedy; a failing start raises its own error."""

import asyncio

import pytest

from cluster.errors import EngineError
from serve_app.startup import with_start_timeout


def a_start() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


async def test_a_timely_start_returns_its_result() -> None:
    starting = a_start()
    starting.set_result("an engine")
    assert await with_start_timeout(60, "target.start_timeout_s", starting) == "an engine"


async def test_a_hanging_start_fails_with_the_key_to_raise() -> None:
    with pytest.raises(EngineError, match=r"within 1e-09 s.*raise target\.start_timeout_s"):
        await with_start_timeout(1e-9, "target.start_timeout_s", a_start())


async def test_a_timeout_within_a_start_is_raised_unchanged() -> None:
    starting = a_start()
    starting.set_exception(TimeoutError("a download"))
    with pytest.raises(TimeoutError, match="a download"):
        await with_start_timeout(60, "target.start_timeout_s", starting)
