"""Starts that hang end with what to do; those that fail, fail as they do."""

import asyncio

import pytest

from cluster.errors import EngineError
from serve_app.startup import started_within


def a_start() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


async def test_what_starts_in_time_is_given() -> None:
    starting = a_start()
    starting.set_result("an engine")
    assert await started_within(60, "target.start_timeout_s", starting) == "an engine"


async def test_a_start_that_hangs_is_given_up_and_says_which_key_is_to_be_raised() -> None:
    with pytest.raises(EngineError, match=r"within 1e-09 s.*raise target\.start_timeout_s"):
        await started_within(1e-9, "target.start_timeout_s", a_start())


async def test_what_times_out_within_a_start_is_no_limit_of_the_start() -> None:
    starting = a_start()
    starting.set_exception(TimeoutError("a download"))
    with pytest.raises(TimeoutError, match="a download"):
        await started_within(60, "target.start_timeout_s", starting)
