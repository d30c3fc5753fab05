"""Allocates the pages of a paged cache to sessions, with sharing, forks and eviction.

A session's cache holds a prefix of its text, in the pages of its page table. Sessions share pages in two ways: a fork
shares its parent's pages, and whole pages of committed tokens are published for sessions with the same prefix. Shared
pages are copied on write. The allocator depends on neither tensors nor page contents. The owner of the memory must
perform the returned copies, in order, before it writes to any page.

`SessionMemory` is the verification scheduler's interface to pages. It has two implementations: the scheduler allocates
`OwnPages`, and an engine such as vLLM manages `EnginePages`. The scheduler handles sessions, blocks and verdicts in
both cases. An engine that manages its pages also decides how much of a prompt to feed and which rows wait for memory.
After each step, the scheduler queries which rows were fed.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

PageHash = Callable[[bytes, bytes, Sequence[int]], bytes]
"""Computes the hash of a page and its predecessors from (key, hash of the previous page, tokens of the page)."""


def page_hash(key: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns a 128-bit hash; the key prevents clients from constructing colliding prompts."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16, key=key).digest()


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Instruction to copy page `source` to page `to` in every layer."""

    source: int
    to: int


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Instruction to copy slot `source` to slot `to` in every layer; slot n is in page n // page_size."""

    source: int
    to: int


@dataclass(frozen=True, slots=True, eq=False)
class _Published:
    """A published page: its tokens continue those of its parent pages."""

    key: bytes
    parent: "_Published | None"
    tokens: tuple[int, ...]
    page: int
    salt: bytes

    def holds(self, parent: "_Published | None", tokens: tuple[int, ...], salt: bytes) -> bool:
        """Returns True if the page has exactly this content; hashes may collide."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


@dataclass(eq=False)
class _Holding:
    table: list[int]
    published: int  # number of leading published pages
    salt: bytes
    pages: tuple[int, ...] | None = None  # copy of `table`, made on demand; None after a change

    def changed(self) -> None:
        self.pages = None


class PageAllocator:
    """A pool of pages, with a page table per session.

    Methods raise KeyError for sessions that are not open.
    """

    def __init__(self, pages: int, page_size: int, hash_key: bytes, hash_page: PageHash = page_hash) -> None:
        self.pages = pages
        self.page_size = page_size
        self._hash_key = hash_key
        self._hash_page = hash_page
        self._sessions: dict[str, _Holding] = {}
        self._refs = [0] * pages  # number of tables that contain each page
        self._free = list(reversed(range(pages)))  # a stack: reuses the most recently freed page, whose memory is warm
        self._published: dict[int, _Published] = {}  # by page number
        self._index: dict[bytes, _Published] = {}  # the same entries, by hash
        self._evictable: OrderedDict[int, None] = OrderedDict()  # published, in no table; least recently used first

    # ------------------------------------------------------------ state

    @property
    def available(self) -> int:
        """Number of pages available to `reserve`."""
        return len(self._free) + len(self._evictable)

    @property
    def cached_pages(self) -> Set[int]:
        """Published pages, which `open` can share."""
        return self._published.keys()

    def pages_for(self, length: int) -> int:
        """Returns the number of pages needed for `length` positions."""
        return -(-length // self.page_size)

    def table(self, session: str) -> tuple[int, ...]:
        """Returns the session's page table: position n is at offset `n % page_size` of page `table[n // page_size]`.

        Returns the same tuple until the table changes.
        """
        holding = self._sessions[session]
        if holding.pages is None:
            holding.pages = tuple(holding.table)
        return holding.pages

    def missing(self, session: str, length: int) -> int:
        """Returns the number of further pages that a session needs for `length` positions; negative if it has spare
        pages.
        """
        return -(-length // self.page_size) - len(self._sessions[session].table)

    # ------------------------------------------------------------ sessions

    def open(self, session: str, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Adds a session; returns the number of leading positions that are already cached.

        The last token is never among them, because the model must compute its logits. Only sessions with the same salt
        share pages.
        """
        assert session not in self._sessions, f"{session} is open already"
        table = self._find(tokens, salt)
        for page in table:
            self._acquire(page)
        self._sessions[session] = _Holding(table, len(table), salt)
        return len(table) * self.page_size

    def fork(self, parent: str, child: str, length: int) -> None:
        """Adds a session that shares the parent's first `length` positions, which must be computed already."""
        assert child not in self._sessions, f"{child} is open already"
        origin = self._sessions[parent]
        assert length <= len(origin.table) * self.page_size, f"{parent} does not reach position {length}"
        table = origin.table[: self.pages_for(length)]
        for page in table:
            self._acquire(page)
        self._sessions[child] = _Holding(table, min(origin.published, len(table)), origin.salt)

    def reserve(self, session: str, start: int, end: int) -> list[PageCopy] | None:
        """Makes positions `start` to `end` writable; invalidates cached positions from `start` on.

        Returns the copies to perform before writing. If pages are insufficient, changes nothing and returns None.
        """
        holding = self._sessions[session]
        table = holding.table
        size = self.page_size
        first = start // size
        last = -(-end // size)
        assert 0 <= start < end, f"there is nothing to write from {start} to {end}"
        assert start <= len(table) * size, f"{session} does not reach position {start}"
        refs = self._refs
        shared = [
            first + index for index, page in enumerate(table[first:last]) if refs[page] > 1 or page in self._published
        ]
        if not shared and last <= len(table):  # common case: the row ends in an existing page
            holding.published = min(holding.published, first)
            return []
        holding.changed()
        missing = max(0, last - len(table))
        if len(shared) + missing > self.available:
            return None
        copies = []
        for index in shared:
            page = table[index]
            table[index] = self._allocate()
            if index * size < start:  # the page's positions before `start` stay valid
                copies.append(PageCopy(page, table[index]))
            # This may make the page evictable, but last in order: the allocations below evict other pages first.
            self._release(page)
        table.extend(self._allocate() for _ in range(missing))
        holding.published = min(holding.published, first)
        return copies

    def truncate(self, session: str, length: int) -> None:
        """Truncates a session's cache to its first `length` positions."""
        holding = self._sessions[session]
        kept_pages = self.pages_for(length)
        while len(holding.table) > kept_pages:  # last page first, so that chains are evicted from the end
            self._release(holding.table.pop())
            holding.changed()
        holding.published = min(holding.published, len(holding.table))

    def publish(self, session: str, tokens: Sequence[int], length: int) -> None:
        """Publishes the whole pages among the first `length` positions, which must be computed, for other sessions.

        `tokens` contains all tokens of the session. Each page is processed only once.
        """
        holding = self._sessions[session]
        if length < (holding.published + 1) * self.page_size:
            return
        assert length <= len(tokens), f"{session} has {len(tokens)} tokens, not {length}"
        assert length <= len(holding.table) * self.page_size, f"{session} does not reach position {length}"
        for index in range(holding.published, length // self.page_size):
            if not self._publish_page(holding, index, self._page_tokens(tokens, index)):
                return
            holding.published += 1

    def withdraw(self, session: str) -> None:
        """Withdraws the session's pages and their successors from sharing, because their contents may be wrong.

        Other sessions keep such pages if they hold them, and publish them again when they compute further tokens.
        """
        suspects = set(self._sessions[session].table)
        wrong: set[_Published] = set()
        for page, entry in self._published.items():  # in order of publication, so parents come first
            if page in suspects or entry.parent in wrong:
                wrong.add(entry)
        for entry in wrong:
            del self._published[entry.page]
            del self._index[entry.key]
            if entry.page in self._evictable:
                del self._evictable[entry.page]
                self._free.append(entry.page)
        for holding in self._sessions.values():
            pages = holding.table[: holding.published]
            holding.published = next((at for at, page in enumerate(pages) if page not in self._published), len(pages))

    def close(self, session: str) -> None:
        """Removes a session; its published pages stay cached until eviction."""
        self.truncate(session, 0)
        del self._sessions[session]

    # ------------------------------------------------------------ sharing by content

    def _page_tokens(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _key(self, parent: _Published | None, tokens: tuple[int, ...], salt: bytes) -> bytes:
        return self._hash_page(self._hash_key, parent.key if parent is not None else salt, tokens)

    def _find(self, tokens: Sequence[int], salt: bytes) -> list[int]:
        """Returns the published pages with the longest matching prefix of `tokens`, excluding the last token."""
        pages: list[int] = []
        parent: _Published | None = None
        for index in range((len(tokens) - 1) // self.page_size):
            content = self._page_tokens(tokens, index)
            page = self._index.get(self._key(parent, content, salt))
            if page is None or not page.holds(parent, content, salt):
                break
            pages.append(page.page)
            parent = page
        return pages

    def _publish_page(self, holding: _Holding, index: int, tokens: tuple[int, ...]) -> bool:
        """Publishes a page after its predecessors, or replaces it with a published page of equal content.

        Returns False on a hash collision; the page and its successors then stay private.
        """
        page = holding.table[index]
        parent = self._published[holding.table[index - 1]] if index else None
        salt = holding.salt
        key = self._key(parent, tokens, salt)
        published = self._index.get(key)
        if published is None:
            assert page not in self._published, f"page {page} is already published with other tokens"
            self._index[key] = self._published[page] = _Published(key, parent, tokens, page, salt)
        elif not published.holds(parent, tokens, salt):
            return False
        else:  # may be the same page, published by a fork
            self._acquire(published.page)
            holding.table[index] = published.page
            holding.changed()
            self._release(page)
        return True

    # ------------------------------------------------------------ single pages

    def _acquire(self, page: int) -> None:
        self._evictable.pop(page, None)
        self._refs[page] += 1

    def _release(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page]:
            return
        if page in self._published:
            self._evictable[page] = None
        else:
            self._free.append(page)

    def _allocate(self) -> int:
        if not self._free:
            self._evict()
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def _evict(self) -> None:
        page, _ = self._evictable.popitem(last=False)
        del self._index[self._published.pop(page).key]
        self._free.append(page)

    # ------------------------------------------------------------ integrity

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping is inconsistent."""
        used = Counter(page for holding in self._sessions.values() for page in holding.table)
        assert [used[page] for page in range(self.pages)] == self._refs, "reference counts do not match the page tables"
        all_pages = sorted([*self._free, *self._evictable, *used])
        assert all_pages == list(range(self.pages)), "a page is lost or accounted for twice"
        assert self._published.keys() - used == self._evictable.keys(), "wrong set of evictable pages"
        entries = self._index.values()
        assert self._index == {entry.key: entry for entry in entries}, "an index entry has a different hash"
        assert self._published == {entry.page: entry for entry in entries}, "index and published pages differ"
        for name, holding in self._sessions.items():
            self._check_session(name, holding)

    def _check_session(self, name: str, holding: _Holding) -> None:
        assert len(set(holding.table)) == len(holding.table), f"{name} contains a page twice"
        assert holding.published <= len(holding.table), f"{name} has more published pages than pages"
        parent: _Published | None = None
        for page in holding.table[: holding.published]:
            entry = self._published.get(page)
            assert entry is not None, f"page {page} of {name} is not published"
            assert entry.parent is parent, f"page {page} of {name} is published with another parent"
            parent = entry


class ForSession(Protocol):
    """The attributes of a step's row used by `SessionMemory`."""

    @property
    def session(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=ForSession)


class SessionMemory(Protocol):
    """Interface to the pages of sessions. `PageAllocator` documents the common methods."""

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
        """Returns the number of cached tokens among a session's first `length` tokens, all of which were fed."""
        ...

    def fed(self, planned: AnyRow) -> AnyRow | None:
        """Returns the row actually fed for a planned row; None if nothing was fed and the row remains due."""
        ...

    def check(self) -> None: ...


class OwnPages(PageAllocator):
    """Pages allocated by the scheduler; every row is fed as planned."""

    def held(self, session: str, length: int) -> int:
        return length

    def fed(self, planned: AnyRow) -> AnyRow | None:
        return planned


class EnginePages:
    """Pages managed by an engine. The engine handles admission, preemption and sharing, so no page is ever missing
    here.

    The engine records each completed step. Page numbers are relative to the session.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self._numbers = tuple(range(pages))
        self._held = 0
        self._fed: Mapping[str, Any] = MappingProxyType({})
        self._computed: Mapping[str, int] = MappingProxyType({})

    def record_step(
        self, fed: Mapping[str, Any], held_pages: int, computed: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Records the latest step: fed rows by session, held pages after the step, and computed tokens by session."""
        self._fed = fed
        self._held = held_pages
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
        """Does nothing, because the engine manages sharing."""

    def close(self, session: str) -> None:
        pass

    def held(self, session: str, length: int) -> int:
        return min(length, self._computed.get(session, 0))

    def fed(self, planned: AnyRow) -> AnyRow | None:
        return self._fed.get(planned.session)

    def check(self) -> None:
        pass
