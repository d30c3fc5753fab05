"""The interface of cache memory to the verification scheduler: pages of the scheduler's own, or an engine's.

Membership, blocks, pacing and verdicts belong to the scheduler in both cases. An engine with its own pages also decides
how much of a prompt it feeds and which rows wait for memory; the scheduler asks what was fed after each step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from cluster.page_allocator import PageAllocator, PageCopy


class ForSession(Protocol):
    """The part of a step's row that memory needs."""

    @property
    def session(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=ForSession)


class SessionMemory(Protocol):
    """Pages of sessions, by name; see `PageAllocator` for the methods that both have."""

    page_size: int

    @property
    def available(self) -> int: ...

    def pages_for(self, length: int) -> int: ...

    def table(self, session: str) -> tuple[int, ...]: ...

    def missing(self, session: str, length: int) -> int: ...

    def open(self, session: str, tokens: Sequence[int], salt: bytes = b"") -> int: ...

    def reserve(self, session: str, start: int, end: int) -> list[PageCopy] | None: ...

    def truncate(self, session: str, length: int) -> None: ...

    def publish(self, session: str, tokens: Sequence[int], length: int) -> None: ...

    def withdraw(self, session: str) -> None: ...

    def close(self, session: str) -> None: ...

    def held(self, session: str, length: int) -> int:
        """Returns the number of a session's first tokens that are held now; `length` of them were fed."""
        ...

    def fed(self, planned: AnyRow) -> AnyRow | None:
        """Returns the row that a step fed for a planned one; None if nothing was fed and the row is still to come."""
        ...

    def check(self) -> None: ...


class OwnPages(PageAllocator):
    """The scheduler's own pages; every row is fed as planned."""

    def held(self, session: str, length: int) -> int:
        return length

    def fed(self, planned: AnyRow) -> AnyRow | None:
        return planned


class EnginePages:
    """An engine's pages. The engine admits, preempts and shares by itself, so no page is ever missing here.

    The engine records each step that it made. Pages are numbered from the session's first one, wherever they are.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self._numbers = tuple(range(pages))
        self._held = 0
        self._fed: Mapping[str, Any] = MappingProxyType({})
        self._computed: Mapping[str, int] = MappingProxyType({})

    def step_made(self, fed: Mapping[str, Any], held: int, computed: Mapping[str, int] = MappingProxyType({})) -> None:
        """Records the latest step: its rows by session, the pages that sessions hold after it, and the tokens in each
        one's pages."""
        self._fed = fed
        self._held = held
        self._computed = computed

    @property
    def available(self) -> int:
        return self.pages - self._held

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def table(self, session: str) -> tuple[int, ...]:
        return self._numbers

    def missing(self, session: str, length: int) -> int:
        return 0

    def open(self, session: str, tokens: Sequence[int], salt: bytes = b"") -> int:
        return 0

    def reserve(self, session: str, start: int, end: int) -> list[PageCopy] | None:
        return []

    def truncate(self, session: str, length: int) -> None:
        pass

    def publish(self, session: str, tokens: Sequence[int], length: int) -> None:
        pass

    def withdraw(self, session: str) -> None:
        """Does nothing: the engine shares pages by itself."""

    def close(self, session: str) -> None:
        pass

    def held(self, session: str, length: int) -> int:
        return min(length, self._computed.get(session, 0))

    def fed(self, planned: AnyRow) -> AnyRow | None:
        return self._fed.get(planned.session)

    def check(self) -> None:
        pass
