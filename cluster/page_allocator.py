"""Pages of a paged cache: which pages hold each session's positions, with sharing, forks and eviction.

A session's cache is a prefix, stored in the pages of its table. Sessions share pages in two ways. A fork shares its
parent's pages, and whole pages of committed tokens are published for sessions that begin with the same tokens. A page
that another session may read is never written; its writer gets another page. The allocator does not depend on tensors
or on a page's contents. The owner of the memory makes the returned copies, in the order they were returned, before it
writes to any page.

`SessionMemory` is the verification scheduler's interface to pages, with two implementations: pages that the scheduler
allocates (`OwnPages`) and pages that an engine such as vLLM manages (`EnginePages`). Membership, blocks and verdicts
belong to the scheduler in both cases. An engine with its own pages also decides how much of a prompt it feeds and which
rows wait for memory; after each step the scheduler queries which rows were fed.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

PageHash = Callable[[bytes, bytes, Sequence[int]], bytes]
"""Hash of a page and all before it, from a key, the hash of the page before and the page's tokens."""


def page_hash(key: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns a 128-bit hash; keyed, so that no client can choose prompts that collide."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16, key=key).digest()


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the whole page `source` to the page `to`, in every layer."""

    source: int
    to: int


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Copy the slot `source` to the slot `to`, in every layer; slot n is in page n // page size."""

    source: int
    to: int


@dataclass(frozen=True, slots=True, eq=False)
class _Published:
    """Contents of a published page: its tokens, which follow those of its parent pages."""

    key: bytes
    parent: "_Published | None"
    tokens: tuple[int, ...]
    page: int
    salt: bytes

    def holds(self, parent: "_Published | None", tokens: tuple[int, ...], salt: bytes) -> bool:
        """Returns True if this page has exactly this content, since hashes may collide."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


@dataclass(eq=False)
class _Holding:
    table: list[int]
    published: int  # number of leading pages that are published
    salt: bytes


class PageAllocator:
    """One pool of pages and a page table per session.

    Naming a session that is not open is an error of the caller and raises KeyError.
    """

    def __init__(self, pages: int, page_size: int, hash_key: bytes, hash_page: PageHash = page_hash) -> None:
        self.pages = pages
        self.page_size = page_size
        self._hash_key = hash_key
        self._hash_page = hash_page
        self._sessions: dict[str, _Holding] = {}
        self._refs = [0] * pages  # number of tables that contain each page
        self._free = list(
            reversed(range(pages))
        )  # a stack: the most recently used page, whose memory is warm, is taken first
        self._published: dict[int, _Published] = {}  # by page number
        self._index: dict[bytes, _Published] = {}  # the same entries, by hash
        self._evictable: OrderedDict[int, None] = OrderedDict()  # published and in no table, least recently used first

    # ------------------------------------------------------------ state

    @property
    def available(self) -> int:
        """Number of pages that `reserve` can hand out."""
        return len(self._free) + len(self._evictable)

    @property
    def cached_pages(self) -> Set[int]:
        """Number of published pages, which `open` can find."""
        return self._published.keys()

    def pages_for(self, length: int) -> int:
        """Returns the number of pages that `length` positions take."""
        return -(-length // self.page_size)

    def table(self, session: str) -> tuple[int, ...]:
        """Returns the session's pages: position n is in page `table[n // page_size]`, at `n % page_size`."""
        return tuple(self._sessions[session].table)

    def missing(self, session: str, length: int) -> int:
        """Returns the number of pages that a session still needs for `length` positions; negative if it has more."""
        return -(-length // self.page_size) - len(self._sessions[session].table)

    # ------------------------------------------------------------ sessions

    def open(self, session: str, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Adds a session; returns how many of its first positions are cached already.

        The last token is never among them, because a model has to compute what follows it. Pages are shared only
        between sessions with the same salt.
        """
        assert session not in self._sessions, f"{session} is open already"
        table = self._find(tokens, salt)
        for page in table:
            self._acquire(page)
        self._sessions[session] = _Holding(table, len(table), salt)
        return len(table) * self.page_size

    def fork(self, parent: str, child: str, length: int) -> None:
        """Adds a session that begins with the parent's first `length` positions, which must be computed."""
        assert child not in self._sessions, f"{child} is open already"
        origin = self._sessions[parent]
        assert length <= len(origin.table) * self.page_size, f"{parent} does not reach position {length}"
        table = origin.table[: self.pages_for(length)]
        for page in table:
            self._acquire(page)
        self._sessions[child] = _Holding(table, min(origin.published, len(table)), origin.salt)

    def reserve(self, session: str, start: int, end: int) -> list[PageCopy] | None:
        """Makes positions `start` to `end` writable; cached positions from `start` on become invalid.

        Returns the copies to make first, or None, with nothing changed, if there are not enough pages.
        """
        holding = self._sessions[session]
        table = holding.table
        first = start // self.page_size
        last = self.pages_for(end)
        assert 0 <= start < end, f"there is nothing to write from {start} to {end}"
        assert start <= len(table) * self.page_size, f"{session} does not reach position {start}"
        shared = [index for index in range(first, min(last, len(table))) if self._is_shared(table[index])]
        if not shared and last <= len(table):  # the usual case: the row ends in a page that the session has
            holding.published = min(holding.published, first)
            return []
        missing = max(0, last - len(table))
        if len(shared) + missing > self.available:
            return None
        copies = []
        for index in shared:
            page = table[index]
            table[index] = self._allocate()
            if index * self.page_size < start:  # positions before `start` must be kept
                copies.append(PageCopy(page, table[index]))
            # It may become evictable here, but last in order: the allocations below take earlier pages.
            self._release(page)
        table.extend(self._allocate() for _ in range(missing))
        holding.published = min(holding.published, first)
        return copies

    def truncate(self, session: str, length: int) -> None:
        """Rolls back to the first `length` positions."""
        holding = self._sessions[session]
        kept_pages = self.pages_for(length)
        while len(holding.table) > kept_pages:  # last page first, so that a chain is evicted from its end
            self._release(holding.table.pop())
        holding.published = min(holding.published, len(holding.table))

    def publish(self, session: str, tokens: Sequence[int], length: int) -> None:
        """Lets other sessions find the whole pages among the first `length` positions, which must be computed.

        `tokens` are all of the session's tokens; each page is examined once.
        """
        holding = self._sessions[session]
        assert length <= len(tokens), f"{session} has {len(tokens)} tokens, not {length}"
        assert length <= len(holding.table) * self.page_size, f"{session} does not reach position {length}"
        for index in range(holding.published, length // self.page_size):
            if not self._publish_page(holding, index, self._page_tokens(tokens, index)):
                return
            holding.published += 1

    def withdraw(self, session: str) -> None:
        """Stops sharing the session's pages, and those published after them, because their contents may be wrong.

        Other sessions that hold such pages keep them, and publish them again once they compute further tokens.
        """
        suspects = set(self._sessions[session].table)
        wrong: set[_Published] = set()
        for page, entry in self._published.items():  # in order of publication: parents come first
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
        """Forgets a session; its published pages stay until they are evicted."""
        self.truncate(session, 0)
        del self._sessions[session]

    # ------------------------------------------------------------ sharing by content

    def _page_tokens(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _key(self, parent: _Published | None, tokens: tuple[int, ...], salt: bytes) -> bytes:
        return self._hash_page(self._hash_key, parent.key if parent is not None else salt, tokens)

    def _find(self, tokens: Sequence[int], salt: bytes) -> list[int]:
        """Returns the published pages that hold the longest prefix of these tokens, without the last token."""
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
        """Publishes a page whose predecessors are published, or replaces it by a published page with equal content.

        Returns False if different content has its hash: then the page and all pages after it stay private.
        """
        page = holding.table[index]
        parent = self._published[holding.table[index - 1]] if index else None
        salt = holding.salt
        key = self._key(parent, tokens, salt)
        published = self._index.get(key)
        if published is None:
            assert page not in self._published, f"page {page} is published with other tokens"
            self._index[key] = self._published[page] = _Published(key, parent, tokens, page, salt)
        elif not published.holds(parent, tokens, salt):
            return False
        else:  # possibly this very page, published by a fork
            self._acquire(published.page)
            holding.table[index] = published.page
            self._release(page)
        return True

    # ------------------------------------------------------------ single pages

    def _is_shared(self, page: int) -> bool:
        return self._refs[page] > 1 or page in self._published

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
        """Raises AssertionError unless every page is accounted for exactly once."""
        used = Counter(page for holding in self._sessions.values() for page in holding.table)
        assert [used[page] for page in range(self.pages)] == self._refs, "references are not what the tables hold"
        all_pages = sorted([*self._free, *self._evictable, *used])
        assert all_pages == list(range(self.pages)), "a page is lost or in two places"
        assert self._published.keys() - used == self._evictable.keys(), "evictable is not published and unused"
        entries = self._index.values()
        assert self._index == {entry.key: entry for entry in entries}, "a hash finds what has another"
        assert self._published == {entry.page: entry for entry in entries}, "the index is not of what is published"
        for name, holding in self._sessions.items():
            self._check_session(name, holding)

    def _check_session(self, name: str, holding: _Holding) -> None:
        assert len(set(holding.table)) == len(holding.table), f"{name} has a page twice"
        assert holding.published <= len(holding.table), f"{name} has published more than it has"
        parent: _Published | None = None
        for page in holding.table[: holding.published]:
            entry = self._published.get(page)
            assert entry is not None, f"page {page} of {name} is not published"
            assert entry.parent is parent, f"page {page} of {name} is published after other tokens"
            parent = entry


class ForSession(Protocol):
    """The part of a step's row that `SessionMemory` needs."""

    @property
    def session(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=ForSession)


class SessionMemory(Protocol):
    """Pages of sessions, by name. `PageAllocator` documents the methods that it shares with this interface."""

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
        """Returns how many of a session's first `length` tokens, all fed, are in the cache now."""
        ...

    def fed(self, planned: AnyRow) -> AnyRow | None:
        """Returns the row that the step fed for a planned one; None if it fed nothing and the row is due again."""
        ...

    def check(self) -> None: ...


class OwnPages(PageAllocator):
    """The scheduler's own pages; every row is fed as planned."""

    def held(self, session: str, length: int) -> int:
        return length

    def fed(self, planned: AnyRow) -> AnyRow | None:
        return planned


class EnginePages:
    """Pages that an engine manages. The engine admits, preempts and shares by itself, so no page is ever missing here.

    The engine records each step that it made. Pages are numbered from the session's first one, wherever they are.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self._numbers = tuple(range(pages))
        self._held = 0
        self._fed: Mapping[str, Any] = MappingProxyType({})
        self._computed: Mapping[str, int] = MappingProxyType({})

    def step_made(
        self, fed: Mapping[str, Any], held_pages: int, computed: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Records the latest step: its rows by session, the number of pages held after it, and each session's computed
        tokens.
        """
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
        """Does nothing: the engine shares pages by itself."""

    def close(self, session: str) -> None:
        pass

    def held(self, session: str, length: int) -> int:
        return min(length, self._computed.get(session, 0))

    def fed(self, planned: AnyRow) -> AnyRow | None:
        return self._fed.get(planned.session)

    def check(self) -> None:
        pass
