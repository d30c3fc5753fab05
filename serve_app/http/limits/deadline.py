"""How long a whole request may take, from its first byte to the last of its answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.errors import SlipstreamError


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
