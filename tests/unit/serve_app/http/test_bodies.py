"""Bodies on their way in: how large, how long, and how much of them at once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

from cluster.errors import CapacityError
from serve_app.http.bodies import Bodies, BodyTimeoutError, BodyTooLargeError

FOREVER_S = 1e6


def request(*chunks: bytes, announced: str | None = None, never_ends: bool = False) -> Request:
    """A request whose body comes in pieces; one that never ends is refused or held where it is."""

    async def messages() -> AsyncIterator[dict[str, Any]]:
        for chunk in chunks:
            yield {"type": "http.request", "body": chunk, "more_body": True}
        if never_ends:
            await asyncio.Event().wait()
        yield {"type": "http.request", "body": b"", "more_body": False}

    headers = [] if announced is None else [(b"content-length", announced.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, messages().__anext__)


async def test_a_body_is_held_until_it_is_a_request() -> None:
    bodies = Bodies(10, 20, FOREVER_S)
    async with bodies.read(request(b"abc", b"de")) as body:
        assert body == b"abcde"
        assert bodies.held == 5
    assert bodies.held == 0


async def test_the_largest_body_is_taken_and_no_larger() -> None:
    bodies = Bodies(10, 20, FOREVER_S)
    async with bodies.read(request(b"x" * 10, announced="10")) as body:
        assert len(body) == 10
    with pytest.raises(BodyTooLargeError, match="larger than 10 bytes"):
        async with bodies.read(request(b"x" * 10, b"x", never_ends=True)):
            pass
    assert bodies.held == 0


async def test_an_announced_length_is_enough_to_refuse() -> None:
    with pytest.raises(BodyTooLargeError):
        async with Bodies(10, 20, FOREVER_S).read(request(announced="11", never_ends=True)):
            pass


@pytest.mark.parametrize("announced", ["-1", "many", "", "1e9"])
async def test_a_length_that_is_none_is_not_believed(announced: str) -> None:
    async with Bodies(10, 20, FOREVER_S).read(request(b"abc", announced=announced)) as body:
        assert body == b"abc"


async def test_bodies_together_are_bounded() -> None:
    bodies = Bodies(10, 20, FOREVER_S)
    async with bodies.read(request(b"x" * 10)), bodies.read(request(b"x" * 9)):
        with pytest.raises(CapacityError, match="20 bytes"):
            async with bodies.read(request(b"xx", never_ends=True)):
                pass
        async with bodies.read(request(b"x")) as body:
            assert body == b"x"
    assert bodies.held == 0


async def test_a_body_that_does_not_come_in_time_is_given_up_and_forgotten() -> None:
    bodies = Bodies(10, 20, timeout_s=0)
    with pytest.raises(BodyTimeoutError, match="within 0 s"):
        async with bodies.read(request(b"abc", never_ends=True)):
            pass
    assert bodies.held == 0


async def test_only_the_reading_is_timed() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with Bodies(10, 20, FOREVER_S).read(request(b"abc")):
            raise TimeoutError
    assert not isinstance(caught.value, BodyTimeoutError)
