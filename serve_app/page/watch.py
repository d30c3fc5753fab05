"""Sampling while the page is open: at most one round per second, for any number of viewers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from serve_app.page.samples import Sample
from serve_app.page.state import PageState, page_state

PERIOD_S = 1.0
STALE_S = 5.0  # older samples are not used: rates since then would say little about the present

Collect = Callable[[], Awaitable[Sequence[Sample]]]


class PageWatch:
    """Keeps the latest state and, for rates, the samples before it."""

    def __init__(self, model: str, collect: Collect, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._collect = collect
        self._clock = clock
        self._turn = asyncio.Lock()
        self._taken_s = float("-inf")
        self._samples: Sequence[Sample] = ()
        self._state: PageState | None = None

    async def state(self) -> PageState:
        """Returns a state at most a second old; concurrent callers share one round of samples."""
        async with self._turn:
            age = self._clock() - self._taken_s
            if self._state is None or age >= PERIOD_S:
                samples = await self._collect()
                before = self._samples if age < STALE_S else ()
                self._state = page_state(self._model, before, samples)
                self._samples = samples
                self._taken_s = self._clock()
            return self._state
