"""Bodies of requests on their way in: each bounded in size and time, all together in what they hold of memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from cluster.errors import CapacityError, RequestError


class BodyTooLargeError(RequestError):
    """The request's body is over the limit."""


class BodyTimeoutError(RequestError):
    """The request's body did not come in time."""


class Bodies:
    """What has come of the bodies that are being read, or are not requests yet."""

    def __init__(self, max_bytes: int, max_held_bytes: int, timeout_s: float) -> None:
        self.held = 0  # bytes
        self._max_bytes = max_bytes
        self._max_held = max_held_bytes
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, which counts as held until the block ends."""
        self._check(_announced(request))
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._receive(request, body)
            except TimeoutError as error:
                raise BodyTimeoutError(f"the body did not come within {self._timeout_s:g} s") from error
            yield bytes(body)
        finally:
            self.held -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        async for chunk in request.stream():
            body += chunk
            self.held += len(chunk)
            self._check(len(body))
            if self.held > self._max_held:
                raise CapacityError(f"other requests' bodies fill {self._max_held} bytes; try again later")

    def _check(self, size: int) -> None:
        """Refuses a body as soon as it is known to be too large; where its length is announced, before it is read."""
        if size > self._max_bytes:
            most = f"{self._max_bytes} bytes, which is the most this server takes"
            raise BodyTooLargeError(f"the body is larger than {most}")


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0
