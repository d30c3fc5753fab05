"""What the verification scheduler asks of the memory behind it: pages of its own, or an engine's.

Membership, blocks, pacing and verdicts are the scheduler's in either case. An engine with pages of its own also chooses
how much of a prompt it feeds, and which rows have to wait for memory; what it fed is asked for after each step.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from cluster.page_allocator import PageAllocator, PageCopy


class ForSession(Protocol):
    """A row of a step, as far as memory knows of it."""

    @property
    def session(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=ForSession)


class SessionMemory(Protocol):
    """Pages of sessions, by name; see `PageAllocator`, whose words these are."""

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
        """How many of a session's first tokens, of which `length` were fed, it holds now."""
        ...

    def fed(self, planned: AnyRow) -> AnyRow | None:
        """What a step fed of a row that was planned for it; None: nothing, it is still to come."""
        ...

    def check(self) -> None: ...


class OwnPages(PageAllocator):
    """The scheduler's own: every row is fed as it was planned."""

    def held(self, session: str, length: int) -> int:
        return length

    def fed(self, planned: AnyRow) -> AnyRow | None:
        return planned


class EnginePages:
    """An engine's: it seats, preempts and shares by itself, so nothing is ever missing here.

    The engine notes each step that it made. Wherever a session's pages lie, here they are numbered from its first one.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self._numbers = tuple(range(pages))
        self._held = 0
        self._fed: Mapping[str, Any] = MappingProxyType({})
        self._computed: Mapping[str, int] = MappingProxyType({})

    def step_made(self, fed: Mapping[str, Any], held: int, computed: Mapping[str, int] = MappingProxyType({})) -> None:
        """Rows of the latest step by session, the pages that sessions hold after it, and tokens in each one's pages."""
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
        """The engine shares pages by itself."""

    def close(self, session: str) -> None:
        pass

    def held(self, session: str, length: int) -> int:
        return min(length, self._computed.get(session, 0))

    def fed(self, planned: AnyRow) -> AnyRow | None:
        return self._fed.get(planned.session)

    def check(self) -> None:
        pass
