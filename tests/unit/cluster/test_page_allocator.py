"""The page allocator loses no page, shares only equal pages, and recomputes no cached page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from cluster.page_allocator import PageAllocator, PageCopy, page_hash

KEY = b"a key of the pool"
SIZE = 4


def a_book(pages: int = 8) -> PageAllocator:
    return PageAllocator(pages, SIZE, KEY)


def a_computed(allocator: PageAllocator, session: str, tokens: Sequence[int]) -> int:
    """Opens a session, caches all of its tokens and publishes its whole pages; returns the previously cached length."""
    cached = allocator.open(session, tokens)
    assert allocator.reserve(session, cached, len(tokens)) == []
    allocator.publish(session, tokens, len(tokens))
    return cached


def test_pages_are_allocated_as_a_session_grows():
    allocator = a_book(pages=8)
    assert allocator.open("s", range(9)) == 0
    assert (allocator.table("s"), allocator.available) == ((), 8)
    assert allocator.reserve("s", 0, 5) == []
    first = allocator.table("s")
    assert (len(first), allocator.available) == (2, 6)
    assert allocator.reserve("s", 5, 8) == []
    assert allocator.table("s") == first, "there was room in the last page"
    assert allocator.reserve("s", 8, 9) == []
    assert allocator.table("s")[:2] == first
    assert len(set(allocator.table("s"))) == 3


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_how_many_pages_a_length_takes(length, pages):
    assert a_book().pages_for(length) == pages


def test_opening_a_session_twice_is_an_error():
    allocator = a_book()
    allocator.open("s", ())
    with pytest.raises(AssertionError, match="s is open already"):
        allocator.open("s", ())
    with pytest.raises(AssertionError, match="s is open already"):
        allocator.fork("s", "s", 0)


def test_writing_forking_and_publishing_beyond_the_end_are_errors():
    allocator = a_book()
    allocator.open("s", ())
    allocator.reserve("s", 0, 4)
    for beyond in (
        lambda: allocator.reserve("s", 5, 6),
        lambda: allocator.fork("s", "fork", 5),
        lambda: allocator.publish("s", range(5), 5),
    ):
        with pytest.raises(AssertionError, match="s does not reach position 5"):
            beyond()
    with pytest.raises(AssertionError, match="s has 3 tokens, not 4"):
        allocator.publish("s", range(3), 4)
    with pytest.raises(AssertionError, match="nothing to write"):
        allocator.reserve("s", 2, 2)


# ------------------------------------------------------------ sharing by content

PROMPT = tuple(range(12))


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [
        ((*PROMPT, 12), 12),
        (PROMPT, 8),  # the last token must be computed
        (PROMPT[:9], 8),
        (PROMPT[:8], 4),
        (PROMPT[:4], 0),
        ((), 0),
        ((*PROMPT[:8], 99, *PROMPT[9:], 12), 8),
        ((99, *PROMPT[1:], 12), 0),  # equal second page after a different first page
        (PROMPT[4:], 0),
    ],
)
def test_a_prompt_hits_the_whole_cached_pages_of_its_prefix(tokens, cached):
    allocator = a_book()
    a_computed(allocator, "first", PROMPT)
    assert allocator.open("second", tokens) == cached
    assert allocator.table("second") == allocator.table("first")[: cached // SIZE]
    assert allocator.available == 8 - 3
    allocator.check()


@pytest.mark.parametrize("hash_page", [page_hash, lambda key, parent, tokens: b"the same"], ids=["keyed", "one hash"])
def test_only_sessions_with_the_same_salt_share_pages(hash_page):
    allocator = PageAllocator(16, SIZE, KEY, hash_page)
    tokens = tuple(range(SIZE + 1))
    assert allocator.open("first", tokens, b"mine") == 0
    allocator.reserve("first", 0, len(tokens))
    allocator.publish("first", tokens, len(tokens))
    assert [allocator.open(name, tokens, salt) for name, salt in (("a", b"mine"), ("b", b"yours"), ("c", b""))] == [
        SIZE,
        0,
        0,
    ]
    allocator.fork("a", "a fork", SIZE)
    allocator.reserve("b", 0, len(tokens))
    allocator.publish("b", tokens, len(tokens))
    allocator.check()
    assert allocator.table("b")[0] != allocator.table("a")[0]


def test_only_whole_pages_among_the_first_length_positions_are_published():
    allocator = a_book()
    allocator.open("first", PROMPT)
    allocator.reserve("first", 0, 12)
    for length, cached in ((3, 0), (7, 4), (12, 12)):
        allocator.publish("first", PROMPT, length)
        assert len(allocator.cached_pages) == cached // SIZE
        assert allocator.open("second", (*PROMPT, 12)) == cached
        allocator.close("second")


def test_published_pages_outlive_their_session():
    allocator = a_book()
    a_computed(allocator, "first", PROMPT[:10])
    table = allocator.table("first")
    allocator.close("first")
    assert (allocator.available, len(allocator.cached_pages)) == (8, 2)
    assert allocator.open("second", PROMPT) == 8
    assert allocator.table("second") == table[:2]
    assert allocator.available == 6
    allocator.check()


def test_withdrawn_pages_are_not_found_until_republished():
    """Later pages are withdrawn too; sessions keep the pages they hold."""
    allocator = a_book()
    longer = (*PROMPT, 12, 13, 14, 15)
    a_computed(allocator, "first", PROMPT)
    assert allocator.open("second", longer) == 12
    allocator.reserve("second", 12, 16)
    allocator.publish("second", longer, 16)
    assert len(allocator.cached_pages) == 4
    table = allocator.table("second")
    allocator.withdraw("first")
    allocator.close("first")
    allocator.check()
    assert len(allocator.cached_pages) == 0
    assert allocator.open("third", PROMPT) == 0
    allocator.publish("second", longer, 16)
    assert allocator.open("fourth", (*longer, 0)) == 16
    assert allocator.table("fourth") == allocator.table("second") == table
    for name in ("second", "third", "fourth"):
        allocator.close(name)
    allocator.check()


def test_pages_computed_by_two_sessions_at_once_are_merged():
    allocator = a_book()
    for session in ("first", "second"):
        allocator.open(session, PROMPT)
        allocator.reserve(session, 0, 12)
    assert allocator.available == 2
    allocator.publish("first", PROMPT, 8)
    allocator.publish("second", PROMPT, 12)
    assert allocator.table("first")[:2] == allocator.table("second")[:2]
    assert (allocator.available, len(allocator.cached_pages)) == (4, 3), (
        "and the second goes on where the first stopped"
    )
    allocator.check()


def test_each_page_is_published_once_however_often_publish_is_called():
    hashed: list[tuple[int, ...]] = []

    def counting(key: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
        hashed.append(tuple(tokens))
        return page_hash(key, parent, tokens)

    allocator = PageAllocator(8, SIZE, KEY, counting)
    allocator.open("s", ())
    allocator.reserve("s", 0, 12)
    for length in range(13):
        allocator.publish("s", PROMPT, length)
    assert hashed == [PROMPT[:4], PROMPT[4:8], PROMPT[8:]]
    allocator.fork("s", "fork", 10)
    allocator.publish("fork", PROMPT, 10)
    assert len(hashed) == 3, "what its parent published is not looked at again"
    allocator.open("like", PROMPT)
    allocator.publish("like", PROMPT, 8)
    assert len(hashed) == 5, "what was found is not looked at again"


def test_a_page_that_was_rolled_back_is_published_with_its_new_tokens():
    allocator = a_book()
    a_computed(allocator, "first", PROMPT[:8])
    allocator.truncate("first", 4)
    again = (*PROMPT[:4], 50, 51, 52, 53)
    assert allocator.reserve("first", 4, 8) == []
    allocator.publish("first", again, 8)
    assert allocator.open("second", (*again, 1)) == 8
    assert allocator.open("third", (*PROMPT[:8], 1)) == 8, "the old one is still known"
    assert allocator.table("second")[1] != allocator.table("third")[1]
    allocator.check()


def test_a_hash_collision_after_another_prefix_is_no_hit():
    """A page depends on all earlier tokens, not only on its own."""
    allocator = PageAllocator(8, SIZE, KEY, lambda key, parent, tokens: bytes(tokens))  # ignores the parent
    a_computed(allocator, "first", (0, 0, 0, 0, 1, 1, 1, 1))
    a_computed(allocator, "second", (2, 2, 2, 2))
    assert allocator.open("third", (2, 2, 2, 2, 1, 1, 1, 1, 3)) == 4
    assert allocator.open("fourth", (0, 0, 0, 0, 1, 1, 1, 1, 3)) == 8


def test_the_hash_is_keyed_and_covers_the_page_and_all_before_it():
    plain = page_hash(KEY, b"parent", (1, 2))
    assert len(plain) == 16
    others = (
        page_hash(b"other", b"parent", (1, 2)),
        page_hash(KEY, b"other", (1, 2)),
        page_hash(KEY, b"parent", (2, 1)),
    )
    assert len({plain, *others}) == 4


# ------------------------------------------------------------ copy on write


def a_fork(length: int, shared: int, **limits: int) -> PageAllocator:
    """Returns an allocator with a `parent` of the given length, and a `fork` of its first `shared` positions."""
    allocator = a_book(**limits)
    allocator.open("parent", ())
    allocator.reserve("parent", 0, length)
    allocator.fork("parent", "fork", shared)
    return allocator


def test_a_fork_shares_and_the_first_to_write_gets_the_copy():
    allocator = a_fork(6, shared=6)
    shared = allocator.table("parent")
    assert (allocator.table("fork"), allocator.available) == (shared, 6)
    copies = allocator.reserve("fork", 6, 7)
    assert copies == [PageCopy(shared[1], allocator.table("fork")[1])]
    assert allocator.table("fork")[0] == shared[0]
    assert allocator.table("fork")[1] not in shared
    assert allocator.reserve("parent", 6, 7) == [], "nobody else has it any more"
    assert allocator.table("parent") == shared
    allocator.check()


def test_a_wholly_rewritten_page_is_replaced_without_a_copy():
    allocator = a_fork(12, shared=12)
    shared = allocator.table("parent")
    assert allocator.reserve("fork", 4, 12) == [], "nothing before position 4 is in those pages"
    assert allocator.table("fork")[0] == shared[0]
    assert not set(allocator.table("fork")[1:]) & set(shared)
    assert allocator.reserve("fork", 2, 12) == [PageCopy(shared[0], allocator.table("fork")[0])]
    assert not set(allocator.table("fork")) & set(shared)
    allocator.check()


# ------------------------------------------------------------ eviction


def test_the_least_recently_used_is_evicted_first_and_a_hit_counts_as_use():
    allocator = a_book(pages=3)
    prompts = {name: (token,) * SIZE for token, name in enumerate("abc")}
    for name, prompt in prompts.items():
        a_computed(allocator, name, prompt)
        allocator.close(name)
    assert allocator.open("again", (*prompts["a"], 1)) == 4
    allocator.close("again")
    allocator.open("new", ())
    assert allocator.reserve("new", 0, 8) == []
    assert len(allocator.cached_pages) == 1
    assert allocator.open("hit", (*prompts["a"], 1)) == 4
    allocator.check()


def test_a_chain_is_evicted_from_its_end():
    """Without its first page, the other pages of a chain would be useless."""
    allocator = a_book(pages=3)
    a_computed(allocator, "s", PROMPT)
    allocator.close("s")
    allocator.open("new", ())
    allocator.reserve("new", 0, 1)
    assert allocator.open("hit", (*PROMPT, 1)) == 8


def test_free_pages_are_used_before_cached_ones_are_evicted():
    allocator = a_book(pages=3)
    a_computed(allocator, "s", PROMPT[:4])
    allocator.close("s")
    allocator.open("new", ())
    allocator.reserve("new", 0, 8)
    assert len(allocator.cached_pages) == 1
    allocator.reserve("new", 8, 12)
    assert len(allocator.cached_pages) == 0
    allocator.check()


# ------------------------------------------------------------ integrity


def in_use() -> PageAllocator:
    """Returns an allocator with free, used, published and evictable pages."""
    allocator = a_book()
    a_computed(allocator, "gone", (9,) * 4)
    allocator.close("gone")
    a_computed(allocator, "s", PROMPT[:10])
    a_computed(allocator, "whole", (8,) * 4)
    allocator.check()
    return allocator


def holders(allocator: PageAllocator) -> list[tuple[Any, str]]:
    """Returns every attribute of the allocator and of its sessions, with its owner."""
    entries = [entry for state in vars(allocator).values() if isinstance(state, dict) for entry in state.values()]
    owners = [allocator, *[entry for entry in entries if hasattr(entry, "__dict__")]]
    return [(owner, name) for owner in owners for name in vars(owner)]


def lost(state: Any) -> Any:
    """Removes the last element."""
    return type(state)([*(state.items() if isinstance(state, dict) else state)][:-1])


def repeated(state: Any) -> Any:
    """Repeats the first element, under a new key in a mapping."""
    if isinstance(state, list):
        return [*state, state[0]]
    key = next(iter(state))
    return type(state)({**state, (key + 1 if isinstance(key, int) else key + key[:1]): state[key]})


def changed(state: Any) -> Any:
    """Increments the first element."""
    return [state[0] + 1, *state[1:]] if isinstance(state, list) else lost(state)


@pytest.mark.parametrize("damage", [lost, repeated, changed])
def test_the_check_finds_a_damaged_entry_anywhere(damage):
    found = 0
    for index, (owner, name) in enumerate(holders(in_use())):
        if isinstance(vars(owner)[name], list | dict) and vars(owner)[name]:
            allocator = in_use()
            owner, name = holders(allocator)[index]
            setattr(owner, name, damage(vars(owner)[name]))
            with pytest.raises(AssertionError):
                allocator.check()
            found += 1
    assert found >= 7


def test_the_check_finds_a_high_count_and_reordered_pages():
    """The faults are a wrong number of published pages, and a reordered page table."""
    found = 0
    for index, (owner, name) in enumerate(holders(in_use())):
        state = vars(owner)[name]
        is_table = isinstance(state, list) and not isinstance(owner, PageAllocator) and len(state) > 1
        if is_table or (isinstance(state, int) and not isinstance(owner, PageAllocator)):
            allocator = in_use()
            owner, name = holders(allocator)[index]
            setattr(owner, name, state[::-1] if is_table else state + 1)
            with pytest.raises(AssertionError):
                allocator.check()
            found += 1
    assert found >= 3


# ------------------------------------------------------------ against a model


def weak_hash(key: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns a hash with frequent collisions."""
    return bytes([page_hash(key, parent, tokens)[0] % 16])


@dataclass
class Pool:
    """Simulated cache that stores a value of all tokens so far at each position."""

    allocator: PageAllocator
    random: Random
    cells: list[list[int]] = field(init=False)
    sessions: dict[str, list[int]] = field(default_factory=dict)  # cached tokens, in the order of opening
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.cells = [[0] * self.allocator.page_size for _ in range(self.allocator.pages)]

    # ---------------------------------------------------------- operations

    def open(self) -> None:
        """Opens a session whose prompt may share a prefix and a suffix with another."""
        name = f"s{self.seen['opened']}"
        self.seen["opened"] += 1
        like = self.random.choice([[], *self.sessions.values()])
        prompt = [*like[: self.random.randint(0, len(like))], *self._tokens()]
        cached = self.allocator.open(name, prompt)
        self.seen["hits"] += cached > 0
        assert cached % self.allocator.page_size == 0
        assert cached < len(prompt)
        self.sessions[name] = prompt[:cached]
        self._write(name, cached, prompt[cached:])

    def extend(self, name: str) -> None:
        self._write(name, len(self.sessions[name]), self._tokens())

    def rewrite(self, name: str) -> None:
        self._write(name, self._length_of(name), self._tokens())

    def reserve_ahead(self, name: str) -> None:
        length = len(self.sessions[name])
        self._reserve(name, length, length + self.random.randint(1, 12))

    def roll_back(self, name: str) -> None:
        length = self._length_of(name)
        self.allocator.truncate(name, length)
        del self.sessions[name][length:]
        assert len(self.allocator.table(name)) == self.allocator.pages_for(length)

    def publish(self, name: str) -> None:
        self.allocator.publish(name, self.sessions[name], self._length_of(name))

    def fork(self, name: str) -> None:
        length = self._length_of(name)
        child = f"s{self.seen['opened']}"
        self.seen["opened"] += 1
        self.allocator.fork(name, child, length)
        self.sessions[child] = self.sessions[name][:length]

    def withdraw(self, name: str) -> None:
        """Withdraws a session's pages from sharing."""
        before = len(self.allocator.cached_pages)
        self.allocator.withdraw(name)
        self.seen["withdrawn"] += before > len(self.allocator.cached_pages)
        assert not set(self.allocator.table(name)) & self.allocator.cached_pages

    def close(self, name: str) -> None:
        self.allocator.close(name)
        del self.sessions[name]

    def step(self) -> None:
        """Runs a random operation on a random session."""
        if not self.sessions or (len(self.sessions) < 8 and self.random.random() < 0.15):
            return self.open()
        act = self.random.choices(
            (
                *(self.extend, self.rewrite, self.reserve_ahead, self.roll_back, self.publish),
                *(self.fork, self.withdraw, self.close),
            ),
            (30, 5, 5, 10, 20, 10 if len(self.sessions) < 8 else 0, 2, 10),
        )[0]
        return act(self.random.choice([*self.sessions]))

    # ---------------------------------------------------------- invariants

    def verify(self) -> None:
        self.allocator.check()
        used = {page for name in self.sessions for page in self.allocator.table(name)}
        assert self.allocator.available == self.allocator.pages - len(used)
        for name, tokens in self.sessions.items():
            table = self.allocator.table(name)
            size = self.allocator.page_size
            read = [self.cells[table[n // size]][n % size] for n in range(len(tokens))]
            assert read == values(tokens), f"{name} does not read what it wrote"

    # ---------------------------------------------------------- helpers

    def _tokens(self) -> list[int]:
        return self.random.choices((0, 1), k=self.random.randint(1, 9))

    def _length_of(self, name: str) -> int:
        """Draws a length, mostly near the end."""
        length = len(self.sessions[name])
        return length - min(self.random.choice((0, 0, 1, 3, self.random.randint(0, length))), length)

    def _write(self, name: str, start: int, tokens: list[int]) -> None:
        """Computes `tokens` from position `start` on, if pages are available."""
        if not self._reserve(name, start, start + len(tokens)):
            return
        whole = [*self.sessions[name][:start], *tokens]
        table = self.allocator.table(name)
        size = self.allocator.page_size
        for n, value in list(enumerate(values(whole)))[start:]:
            self.cells[table[n // size]][n % size] = value
        self.sessions[name] = whole

    def _reserve(self, name: str, start: int, end: int) -> bool:
        """Reserves pages, makes the copies, and overwrites all writable positions that are not kept."""
        allocator = self.allocator
        before = self.allocator.table(name)
        cached = len(self.allocator.cached_pages)
        available = allocator.available
        size = allocator.page_size
        first = start // size
        last = allocator.pages_for(end)
        others = {page for other in self.sessions if other != name for page in allocator.table(other)}
        missing = max(0, last - len(before))
        needed = missing + sum(page in others or page in allocator.cached_pages for page in before[first:last])
        copies = allocator.reserve(name, start, end)
        assert (copies is None) == (needed > available)
        if copies is None:
            self.seen["refused"] += 1
            assert (allocator.table(name), allocator.available, len(allocator.cached_pages)) == (
                before,
                available,
                cached,
            )
            return False
        self.seen["copies"] += len(copies)
        self.seen["evicted"] += cached - len(allocator.cached_pages)
        after = allocator.table(name)
        assert after[:first] == before[:first]
        assert len(after) == max(last, len(before))
        assert not others.intersection(after[first:last]), "writes what others read"
        for copy in copies:
            self.cells[copy.to] = list(self.cells[copy.source])
        for n in range(start, end):
            self.cells[after[n // size]][n % size] = -1
        return True


def values(tokens: Sequence[int]) -> list[int]:
    """Returns a value of all tokens so far for each position."""
    found = []
    state = 0
    for token in tokens:
        state = hash((state, token))
        found.append(state)
    return found


@pytest.mark.parametrize(
    ("seed", "pages", "page_size", "hash_page"),
    [(1, 16, 4, page_hash), (2, 40, 2, page_hash), (3, 24, 3, weak_hash), (4, 50, 5, weak_hash)],
)
def test_ten_thousand_random_operations_lose_no_page_and_share_none_wrongly(seed, pages, page_size, hash_page):
    pool = Pool(PageAllocator(pages, page_size, KEY, hash_page), Random(seed))
    for _ in range(10_000):
        pool.step()
        pool.verify()
    for name in list(pool.sessions):
        pool.close(name)
    allocator = pool.allocator
    allocator.check()
    assert allocator.available == pages
    assert all(pool.seen[event] > 100 for event in ("hits", "refused", "copies", "evicted", "withdrawn")), pool.seen
    allocator.open("all", ())
    assert allocator.reserve("all", 0, pages * page_size) == []
    assert (sorted(allocator.table("all")), len(allocator.cached_pages)) == (list(range(pages)), 0)
