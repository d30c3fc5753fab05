"""The router's memory of prefixes cached at targets, and when it forgets them."""

from cluster.page_allocator import PageAllocator
from cluster.routing.session_router import MOST_PAGES, TOKENS_A_SESSION, PrefixAffinity, PrefixOptions, page_keys

KEY = bytes(32)
PAGE = 4


def homes(**options: float) -> PrefixAffinity:
    return PrefixAffinity(KEY, PrefixOptions(PAGE, **options))  # type: ignore[arg-type]


def test_a_target_has_the_pages_up_to_the_first_that_differs() -> None:
    memory = homes()
    memory.record("T", memory.keys(range(20)))
    changed = [*range(8), 99, *range(9, 20)]
    assert memory.matches(memory.keys(range(20))) == {"T": 16}
    assert memory.matches(memory.keys(changed)) == {"T": 8}
    assert memory.matches(memory.keys([99, *range(1, 20)])) == {}


def test_a_target_finds_as_much_in_its_cache_as_the_router_expects() -> None:
    """The real allocator's answer, for every length: the last token is computed in any case."""
    for length in range(1, 20):
        memory = homes()
        memory.record("T", memory.keys(range(17)))
        pages = PageAllocator(16, PAGE, KEY)
        pages.open("first", range(17))
        pages.reserve("first", 0, 17)
        pages.publish("first", range(17), 16)
        expected = memory.matches(memory.keys(range(length))).get("T", 0)
        assert pages.open("second", range(length)) == expected


def test_what_was_used_longest_ago_is_forgotten_from_its_end() -> None:
    memory = homes(pages_a_target=4)
    memory.record("T", memory.keys(range(13)))  # 3 pages
    memory.record("T", memory.keys(range(100, 109)))  # 2 more
    assert memory.matches(memory.keys(range(13))) == {"T": 8}
    assert memory.matches(memory.keys(range(100, 109))) == {"T": 8}


def test_a_target_that_is_gone_has_nothing() -> None:
    memory = homes()
    memory.record("T", memory.keys(range(20)))
    memory.forget("T")
    assert memory.matches(memory.keys(range(20))) == {}


def test_what_is_found_is_worth_sessions_but_never_more_than_allowed() -> None:
    memory = PrefixAffinity(KEY, PrefixOptions(16, most_sessions=2))
    text = memory.keys(range(10 * TOKENS_A_SESSION + 1))
    memory.record("T", memory.keys(range(TOKENS_A_SESSION + 1)))
    assert memory.worth(text) == {"T": 1.0}
    memory.record("U", text)
    assert memory.worth(text) == {"U": 2.0}
    assert PrefixAffinity(KEY, PrefixOptions(16)).worth(text) == {}


def test_a_common_beginning_does_not_count_as_the_whole_text() -> None:
    """However much both are worth: the difference is what would be computed again."""
    memory = PrefixAffinity(KEY, PrefixOptions(16, most_sessions=4))
    text = memory.keys(range(10 * TOKENS_A_SESSION + 1))
    memory.record("home", text)
    memory.record("other", text[: -TOKENS_A_SESSION // 16])
    assert memory.worth(text) == {"home": 4.0, "other": 3.0}


def test_no_text_is_looked_at_beyond_a_bound_and_keys_differ_by_key() -> None:
    assert len(page_keys(KEY, range(PAGE * MOST_PAGES + 100), PAGE)) == MOST_PAGES
    assert page_keys(KEY, range(9), PAGE) != page_keys(b"other", range(9), PAGE)
    assert page_keys(KEY, range(PAGE), PAGE) == [], "its last token is computed in any case"
    assert page_keys(KEY, (), PAGE) == []


def test_pages_of_another_salt_are_not_found() -> None:
    """The real allocator does not share pages between salts either."""
    pages = PageAllocator(16, PAGE, KEY)
    pages.open("first", range(17), b"mine")
    pages.reserve("first", 0, 17)
    pages.publish("first", range(17), 16)
    memory = homes()
    memory.record("T", memory.keys(range(17), b"mine"))
    for salt, tokens in {b"mine": 16, b"yours": 0, b"": 0}.items():
        assert memory.matches(memory.keys(range(17), salt)).get("T", 0) == tokens
        assert pages.open(f"salted {salt!r}", range(17), salt) == tokens
