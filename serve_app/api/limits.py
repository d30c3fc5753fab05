"""What a request may take of the server: memory and time.

Bodies of requests on their way in: each bounded in size and time, all together in number and in what they hold.

How long a whole request may take, from its first byte to the last of its answer.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from cluster.errors import CapacityError, RequestError, SlipstreamError

GRANTED_S = 0.25  # in which bodies come whose senders do not dawdle


class BodyTooLargeError(RequestError):
    """The request's body is over the limit."""


class BodyTimeoutError(RequestError):
    """The request's body did not come in time."""


@dataclass(eq=False, slots=True)
class _Arrival:
    """A body that is being read."""

    bound: asyncio.Timeout
    since: float  # by the event loop's clock
    body: bytearray = field(default_factory=bytearray)


class Bodies:
    """What has come of the bodies that are being read, or are not requests yet.

    Where there is room for no more, the one that has been read for longest is given up, once it was granted its time:
    whoever sends a byte now and then keeps nobody out. Where none has been read for long, it is the newcomer that is
    refused.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_held_bytes: int,
        max_reading: int,
        timeout_s: float,
        granted_s: float = GRANTED_S,
    ) -> None:
        self.held = 0  # bytes
        self._max_bytes = max_bytes
        self._max_held = max_held_bytes
        self._max_reading = max_reading
        self._timeout_s = timeout_s
        self._granted_s = granted_s
        self._arriving: dict[_Arrival, None] = {}  # the oldest first

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, which counts as held until the block ends."""
        self._check(_announced(request))
        if len(self._arriving) >= self._max_reading and not self._gives_one_up():
            raise CapacityError(f"{len(self._arriving)} requests' bodies are being read; try again later")
        arrival = _Arrival(asyncio.timeout(self._timeout_s), asyncio.get_running_loop().time())
        try:
            await self._receive_in_time(request, arrival)
            yield bytes(arrival.body)
        finally:
            self.held -= len(arrival.body)

    async def _receive_in_time(self, request: Request, arrival: _Arrival) -> None:
        self._arriving[arrival] = None
        try:
            async with arrival.bound:
                await self._receive(request, arrival.body)
            if arrival not in self._arriving:  # as its last bytes came
                raise TimeoutError
        except TimeoutError as error:
            in_time = arrival in self._arriving
            late = f"within {self._timeout_s:g} s" if in_time else "before many others wanted its place"
            raise BodyTimeoutError(f"the body did not come {late}") from error
        finally:
            self._arriving.pop(arrival, None)

    async def _receive(self, request: Request, body: bytearray) -> None:
        async for chunk in request.stream():
            body += chunk
            self.held += len(chunk)
            self._check(len(body))
            while self.held > self._max_held:
                if not self._gives_one_up():
                    raise CapacityError(f"other requests' bodies fill {self._max_held} bytes; try again later")

    def _gives_one_up(self) -> bool:
        """Whether it gave up, and forgot, the body that has been read for longest."""
        oldest = next(iter(self._arriving), None)
        if oldest is None or asyncio.get_running_loop().time() < oldest.since + self._granted_s:
            return False
        del self._arriving[oldest]
        self.held -= len(oldest.body)
        oldest.body.clear()
        if not oldest.bound.expired():
            oldest.bound.reschedule(0)
        return True

    def _check(self, size: int) -> None:
        """Refuses a body as soon as it is known to be too large; where its length is announced, before it is read."""
        if size > self._max_bytes:
            most = f"{self._max_bytes} bytes, which is the most this server takes"
            raise BodyTooLargeError(f"the body is larger than {most}")


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


class RequestTimeoutError(SlipstreamError):
    """The request took longer than requests may."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When one request must be over, if ever."""

    limit_s: float | None
    at: float | None  # by the event loop's clock

    @classmethod
    def within(cls, limit_s: float | None) -> "Deadline":
        """From now on."""
        return cls(limit_s, None if limit_s is None else asyncio.get_running_loop().time() + limit_s)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Cancels what is in the block by then, and raises RequestTimeoutError."""
        bound = asyncio.timeout_at(self.at)
        try:
            async with bound:
                yield
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise RequestTimeoutError(f"the request was not over within {self.limit_s:g} s") from error
