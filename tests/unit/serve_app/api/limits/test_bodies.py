"""Tests limits of request bodies: size, duration and total bytes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request

from cluster.errors import CapacityError
from serve_app.api.limits import Bodies, BodyTimeoutError, BodyTooLargeError

FOREVER_S = 1e6


def bounded(*, max_reading: int = 9, timeout_s: float = FOREVER_S, min_upload_s: float = 0) -> Bodies:
    return Bodies(
        max_bytes=10, max_held_bytes=20, max_reading=max_reading, timeout_s=timeout_s, min_upload_s=min_upload_s
    )


def request(*chunks: bytes, announced: str | None = None, never_ends: bool = False) -> Request:
    """Returns a request whose body arrives in chunks, or never ends."""

    async def messages() -> AsyncIterator[dict[str, Any]]:
        for chunk in chunks:
            yield {"type": "http.request", "body": chunk, "more_body": True}
        if never_ends:
            await asyncio.Event().wait()
        yield {"type": "http.request", "body": b"", "more_body": False}

    headers = [] if announced is None else [(b"content-length", announced.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, messages().__anext__)


async def test_a_body_is_counted_while_it_is_processed() -> None:
    bodies = bounded()
    async with bodies.read(request(b"abc", b"de")) as body:
        assert body == b"abcde"
        assert bodies.held == 5
    assert bodies.held == 0


async def test_bodies_up_to_the_size_limit_are_accepted() -> None:
    bodies = bounded()
    async with bodies.read(request(b"x" * 10, announced="10")) as body:
        assert len(body) == 10
    with pytest.raises(BodyTooLargeError, match="larger than 10 bytes"):
        async with bodies.read(request(b"x" * 10, b"x", never_ends=True)):
            pass
    assert bodies.held == 0


async def test_a_content_length_over_the_limit_is_refused() -> None:
    with pytest.raises(BodyTooLargeError):
        async with bounded().read(request(announced="11", never_ends=True)):
            pass


@pytest.mark.parametrize("announced", ["-1", "many", "", "1e9"])
async def test_an_invalid_content_length_is_ignored(announced: str) -> None:
    async with bounded().read(request(b"abc", announced=announced)) as body:
        assert body == b"abc"


async def test_total_body_bytes_are_limited() -> None:
    bodies = bounded(min_upload_s=FOREVER_S)
    async with bodies.read(request(b"x" * 10)), bodies.read(request(b"x" * 9)):
        with pytest.raises(CapacityError, match="20 bytes"):
            async with bodies.read(request(b"xx", never_ends=True)):
                pass
        async with bodies.read(request(b"x")) as body:
            assert body == b"x"
    assert bodies.held == 0


async def test_a_slow_body_times_out_and_is_released() -> None:
    bodies = bounded(timeout_s=0)
    with pytest.raises(BodyTimeoutError, match="within 0 s"):
        async with bodies.read(request(b"abc", never_ends=True)):
            pass
    assert bodies.held == 0


async def test_the_timeout_covers_only_the_upload() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with bounded().read(request(b"abc")):
            raise TimeoutError
    assert not isinstance(caught.value, BodyTimeoutError)


async def read(bodies: Bodies, *chunks: bytes, never_ends: bool = False) -> bytes:
    async with bodies.read(request(*chunks, never_ends=never_ends)) as body:
        return body


async def dawdling(bodies: Bodies, *chunks: bytes) -> asyncio.Task[bytes]:
    """Starts reading a body that never ends."""
    reading = asyncio.create_task(read(bodies, *chunks, never_ends=True))
    await asyncio.sleep(0)
    return reading


async def test_the_oldest_upload_is_dropped_for_a_new_one() -> None:
    bodies = bounded(max_reading=2)
    oldest = await dawdling(bodies, b"a")
    slow = await dawdling(bodies, b"b")
    assert await read(bodies, b"abc") == b"abc"
    with pytest.raises(BodyTimeoutError, match="dropped for newer uploads"):
        await oldest
    assert not slow.done()
    assert bodies.held == 1
    assert await read(bodies, b"abc") == b"abc"  # within the limit
    assert not slow.done()
    await ended(slow)


async def test_each_new_upload_drops_one() -> None:
    bodies = bounded(max_reading=2)
    slow = [await dawdling(bodies) for _ in range(5)]
    done, waiting = await asyncio.wait(slow, timeout=0)
    assert done == set(slow[:3])
    assert waiting == set(slow[3:])
    for one in done:
        with pytest.raises(BodyTimeoutError):
            await one
    await ended(*waiting)


async def test_a_new_upload_is_refused_if_none_is_slow() -> None:
    bodies = bounded(max_reading=2, min_upload_s=FOREVER_S)
    reading = [await dawdling(bodies), await dawdling(bodies)]
    with pytest.raises(CapacityError, match="2 upload slots"):
        await read(bodies, b"abc")
    assert not any(one.done() for one in reading)
    await ended(*reading)
    assert await read(bodies, b"abc") == b"abc"


async def test_slow_uploads_are_dropped_at_the_byte_limit() -> None:
    bodies = bounded()
    slow = [await dawdling(bodies, b"x" * 10), await dawdling(bodies, b"x" * 10)]
    assert await read(bodies, b"abc") == b"abc"
    with pytest.raises(BodyTimeoutError):
        await slow[0]
    assert bodies.held == 10
    await ended(slow[1])
    assert bodies.held == 0


async def test_a_dropped_body_is_refused_even_if_it_completes() -> None:
    bodies = bounded(max_reading=1)
    ends = asyncio.Event()

    async def messages() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "http.request", "body": b"abc", "more_body": True}
        await ends.wait()
        yield {"type": "http.request", "body": b"de", "more_body": False}

    async def ending() -> bytes:
        slow = Request({"type": "http", "method": "POST", "headers": []}, messages().__anext__)
        async with bodies.read(slow) as body:
            return body

    reading = asyncio.create_task(ending())
    await asyncio.sleep(0)
    ends.set()
    assert await read(bodies, b"x") == b"x"
    with pytest.raises(BodyTimeoutError):
        await reading
    assert bodies.held == 0


async def test_a_body_that_exceeds_the_byte_limit_with_its_last_chunk_is_dropped() -> None:
    bodies = bounded()
    async with bodies.read(request(b"x" * 10)), bodies.read(request(b"x" * 10)):
        with pytest.raises(BodyTimeoutError):
            await read(bodies, b"x")
    assert bodies.held == 0


async def ended(*reading: asyncio.Task[bytes]) -> None:
    """Disconnects the clients."""
    for one in reading:
        one.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
