"""Limits on a request: memory for its body, time to send its body, and total time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from cluster.errors import CapacityError, RequestError, SlipstreamError

MIN_UPLOAD_S = 0.25  # minimum seconds that every client gets to send a body


class BodyTooLargeError(RequestError):
    """Raised if the request body exceeds the size limit."""


class BodyTimeoutError(RequestError):
    """Raised if the request body did not arrive in time."""


@dataclass(eq=False, slots=True)
class _Arrival:
    """A request body that is still arriving."""

    bound: asyncio.Timeout
    since: float  # event loop time in seconds
    body: bytearray = field(default_factory=bytearray)


class Bodies:
    """Request bodies in memory: those that are arriving, and those not yet parsed.

    If a limit is reached, the body that has been arriving longest is dropped, once it has had its minimum time, so slow
    uploads cannot block others. If no body has, the new one is refused.
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
        """Reads a whole body; its bytes count as held until the block ends."""
        self._check(_announced(request))
        if len(self._arriving) >= self._max_reading and not self._drop_slowest():
            raise CapacityError(f"{len(self._arriving)} request bodies are being read, the limit; try again later")
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
            raise BodyTimeoutError("the body was dropped for faster uploads; try again later") from error
        finally:
            self._arriving.pop(arrival, None)

    async def _receive(self, request: Request, body: bytearray) -> None:
        async for chunk in request.stream():
            body += chunk
            self.held += len(chunk)
            self._check(len(body))
            while self.held > self._max_held:
                if not self._drop_slowest():
                    raise CapacityError(f"request bodies fill the limit of {self._max_held} bytes; try again later")

    def _drop_slowest(self) -> bool:
        """Drops the body that has been arriving longest. Returns whether one could be dropped."""
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
        """Refuses a body as soon as its announced or received length is too large."""
        if size > self._max_bytes:
            raise BodyTooLargeError(f"the body is larger than {self._max_bytes} bytes, this server's limit")


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


class RequestTimeoutError(SlipstreamError):
    """Raised if the request took longer than allowed."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time by which a request must end; None means never."""

    limit_s: float | None
    at: float | None  # event loop time in seconds

    @classmethod
    def within(cls, limit_s: float | None) -> "Deadline":
        """Returns a deadline `seconds` from now."""
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
