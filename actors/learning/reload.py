"""Watches the current version of a drafter's learned draft, loads it beside the one in use, and exchanges them.

Every period, `DraftReload` compares `versions/current.json` with the version in use. If they differ, the current
version is loaded, packed and tried on a separate thread, and then takes over between two drafting passes
(`Drafter.exchange`). A version that cannot be used is refused once, with one log line, and the one in use stays.

The drafter also compares the acceptance of the version in use with that of the previous one (`VersionWatch`). If it is
clearly worse, the shared folder is rolled back, and every drafter follows. No block waits for any of this.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from actors.learning.versions import VersionFolder
from cluster.draft_quality import VersionWatch
from cluster.drafting.method import ExchangesWeights
from cluster.errors import ModelError

PERIOD_S = 5.0  # seconds between checks of the current version
CONFIGURED = 0  # version number of the configured draft

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Version:
    """A version that a drafter can load."""

    number: int
    folder: Path
    first_token_acceptance: float | None = None  # expected in serving


@dataclass(frozen=True, slots=True)
class LearnedDraft:
    """All versions of a drafter's draft, and the fingerprints of the target and the draft that they must fit."""

    versions: VersionFolder
    configured: Version
    target: str  # fingerprint of the target
    draft: str  # fingerprint of the configured draft

    def current(self) -> int:
        """Returns the number of the current version. Raises ModelError if it is unreadable."""
        return self.versions.current()

    def find(self, number: int) -> Version:
        """Returns a version. Raises ModelError if it is unreadable, or is of another target or configured draft."""
        if number == CONFIGURED:
            return self.configured
        folder = self.versions.folder_of(number)
        manifest = self.versions.manifest_of(number)
        if manifest.target != self.target:
            raise ModelError(
                f"{folder} learned from target {manifest.target}, but this target is {self.target}; evaluate it on this"
                " target's answers and add it as a version again"
            )
        if not manifest.fits(self.target, self.draft):
            raise ModelError(
                f"{folder} descends from another draft than draft.model; set draft.model to that draft, or run"
                " `slipstream learn promote CONFIG 0` to use the configured one"
            )
        recent = manifest.recent
        return Version(number, folder, None if recent is None else recent.after.agreement)


class ServesVersions(Protocol):
    """The part of a `Drafter` that `DraftReload` uses."""

    @property
    def version_watch(self) -> VersionWatch: ...

    def exchange(
        self, exchange: Callable[[], object], version: int, published_acceptance: float | None = None
    ) -> Awaitable[object]: ...


class DraftReload:
    """Keeps one drafter at the current version of its draft.

    `counts` counts versions that were swapped in (`swapped`), refused (`refused`) or rolled back by this drafter
    (`rolled_back`), and failed reads or writes of the folder (`failed`).
    """

    def __init__(
        self,
        draft: LearnedDraft,
        method: ExchangesWeights,
        drafter: ServesVersions,
        period_s: float = PERIOD_S,
        *,
        prepare_thread: Callable[[], None] | None = None,  # runs first on the loading thread
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter(swapped=0, refused=0, rolled_back=0, failed=0)
        self._draft = draft
        self._method = method
        self._drafter = drafter
        self._period_s = period_s
        self._sleep = sleep
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loading", initializer=prepare_thread)
        self._refused: int | None = None  # version refused last; None once the current version is in use
        self._problem = ""  # last logged error of the folder

    @property
    def version(self) -> int:
        """Number of the version in use."""
        return self._drafter.version_watch.version

    async def run(self) -> None:
        """Follows the current version until cancelled."""
        while True:
            await self.check()
            await self._sleep(self._period_s)

    async def check(self) -> None:
        """Rolls back the version in use if its acceptance is clearly worse, then swaps in the current version if it
        differs.
        """
        try:
            if self.version != CONFIGURED and self._drafter.version_watch.is_worse:
                await self._roll_back()
            current = await self._in_thread(self._draft.current)
        except ModelError as error:
            self.counts["failed"] += 1
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("version %d of the draft stays in use: %s", self.version, error)
            return
        self._problem = ""
        if current == self.version:
            self._refused = None
        elif current != self._refused:
            await self._swap(current)

    def close(self) -> None:
        """Ends the loading thread once its running task is done."""
        self._thread.shutdown(wait=False)

    def summary(self) -> dict[str, Any]:
        """Returns the state for display."""
        return {**self._drafter.version_watch.summary(), "counts": dict(self.counts)}

    # ------------------------------------------------------------ helpers

    async def _roll_back(self) -> None:
        bad = self.version
        found = self._drafter.version_watch.summary()
        if await self._in_thread(self._draft.current) != bad:
            return  # already replaced or rolled back
        parent = await self._in_thread(lambda: self._draft.versions.rollback(bad))
        self.counts["rolled_back"] += 1
        log.error(
            "rolled back draft version %d to %d: its acceptance is %.2f, the previous version's %.2f",
            bad,
            parent,
            found["acceptance"],
            found["acceptance_before"],
        )

    async def _swap(self, number: int) -> None:
        began_s = self._clock()
        earlier = self.version
        try:
            version = await self._in_thread(lambda: self._draft.find(number))
            exchange = await self._in_thread(lambda: self._method.prepare_weights(version.folder))
        except Exception as error:  # noqa: BLE001  # a broken checkpoint may raise anything, and the drafter continues
            self._refused = number
            self.counts["refused"] += 1
            what = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
            log.error("version %d of the draft is refused, and version %d stays: %s", number, earlier, what)
            return
        self._refused = None
        held = [await self._drafter.exchange(exchange, number, version.first_token_acceptance)]
        self.counts["swapped"] += 1
        log.info("the draft is version %d, after %d; loading took %.1f s", number, earlier, self._clock() - began_s)
        await self._in_thread(held.clear)  # freeing weights takes longer than exchanging them

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
