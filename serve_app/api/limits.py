"""Request limits: body memory, upload time and total time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from cluster.errors import CapacityError, RequestError, SlipstreamError

MIN_UPLOAD_S = 0.25  # guaranteed upload time, in seconds


class BodyTooLargeError(RequestError):
    """Raised if the request body exceeds the size limit."""


class BodyTimeoutError(RequestError):
    """Raised if the request body did not arrive in time."""


@dataclass(eq=False, slots=True)
class _Arrival:
    """Request body that is still being received."""

    bound: asyncio.Timeout
    since: float  # event loop time in seconds
    body: bytearray = field(default_factory=bytearray)


class Bodies:
    """Receives request bodies, and limits their number and memory.

    At a limit, drops the oldest upload if its guaranteed time is over, so slow uploads cannot block others;
    otherwise refuses the new body.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_held_bytes: int,
        max_reading: int,
        timeout_s: float,
        min_upload_s: float = MIN_UPLOAD_S,
    ) -> None:
        self.held = 0  # bytes in memory
        self._max_bytes = max_bytes
        self._max_held = max_held_bytes
        self._max_reading = max_reading
        self._timeout_s = timeout_s
        self._min_upload_s = min_upload_s
        self._arriving: dict[_Arrival, None] = {}  # oldest first

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Reads a whole body; its bytes count against the memory limit until the block ends."""
        self._check(_content_length(request))
        if len(self._arriving) >= self._max_reading and not self._drop_oldest():
            raise CapacityError(f"all {len(self._arriving)} upload slots are in use; try again later")
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
            if arrival not in self._arriving:  # dropped while its last bytes arrived
                raise TimeoutError
        except TimeoutError as error:
            if arrival in self._arriving:
                raise BodyTimeoutError(f"the body did not arrive within {self._timeout_s:g} s") from error
            raise BodyTimeoutError("the body was dropped for newer uploads; try again later") from error
        finally:
            self._arriving.pop(arrival, None)

    async def _receive(self, request: Request, body: bytearray) -> None:
        async for chunk in request.stream():
            body += chunk
            self.held += len(chunk)
            self._check(len(body))
            while self.held > self._max_held:
                if not self._drop_oldest():
                    raise CapacityError(f"request bodies use all {self._max_held} bytes of memory; try again later")

    def _drop_oldest(self) -> bool:
        """Drops the oldest upload if its guaranteed time is over. Returns whether it was dropped."""
        oldest = next(iter(self._arriving), None)
        if oldest is None or asyncio.get_running_loop().time() < oldest.since + self._min_upload_s:
            return False
        del self._arriving[oldest]
        self.held -= len(oldest.body)
        oldest.body.clear()
        if not oldest.bound.expired():
            oldest.bound.reschedule(0)
        return True

    def _check(self, size: int) -> None:
        """Raises BodyTooLargeError if the announced or received size exceeds the limit."""
        if size > self._max_bytes:
            raise BodyTooLargeError(f"the body is larger than {self._max_bytes} bytes, this server's limit")


def _content_length(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


class RequestTimeoutError(SlipstreamError):
    """Raised if the request exceeds its time limit."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time by which a request must end; None means never."""

    limit_s: float | None
    at: float | None  # event loop time in seconds

    @classmethod
    def within(cls, limit_s: float | None) -> "Deadline":
        """Returns a deadline `limit_s` seconds from now."""
        return cls(limit_s, None if limit_s is None else asyncio.get_running_loop().time() + limit_s)

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancels the block at the deadline and raises RequestTimeoutError."""
        bound = asyncio.timeout_at(self.at)
        try:
            async with bound:
                yield
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise RequestTimeoutError(f"the request did not finish within {self.limit_s:g} s") from error
