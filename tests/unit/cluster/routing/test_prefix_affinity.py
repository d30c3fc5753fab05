"""Tests the router's record of prefixes cached at targets, and its expiry."""

import pytest

from cluster.page_allocator import PageAllocator
from cluster.routing.session_router import PrefixAffinity, PrefixOptions, page_keys

KEY = bytes(32)
PAGE = 4


def homes(**options: float) -> PrefixAffinity:
    return PrefixAffinity(KEY, PrefixOptions(PAGE, **options))  # type: ignore[arg-type]


def test_a_target_matches_up_to_the_first_differing_page() -> None:
    memory = homes()
    memory.record("T", memory.keys(range(20)))
    changed = [*range(8), 99, *range(9, 20)]
    assert memory.matches(memory.keys(range(20))) == {"T": 16}
    assert memory.matches(memory.keys(changed)) == {"T": 8}
    assert memory.matches(memory.keys([99, *range(1, 20)])) == {}


def test_the_allocator_finds_as_many_cached_tokens_as_the_router_expects() -> None:
    """The last token is always computed."""
    for length in range(1, 20):
        memory = homes()
        memory.record("T", memory.keys(range(17)))
        pages = PageAllocator(16, PAGE, KEY)
        pages.open("first", range(17))
        pages.reserve("first", 0, 17)
        pages.publish("first", range(17), 16)
        expected = memory.matches(memory.keys(range(length))).get("T", 0)
        assert pages.open("second", range(length)) == expected


def test_the_least_recently_used_text_is_forgotten_from_its_end() -> None:
    memory = homes(pages_per_target=4)
    memory.record("T", memory.keys(range(13)))  # 3 pages
    memory.record("T", memory.keys(range(100, 109)))  # 2 more
    assert memory.matches(memory.keys(range(13))) == {"T": 8}
    assert memory.matches(memory.keys(range(100, 109))) == {"T": 8}


def test_a_lost_target_is_forgotten() -> None:
    memory = homes()
    memory.record("T", memory.keys(range(20)))
    memory.forget("T")
    assert memory.matches(memory.keys(range(20))) == {}


def test_the_bonus_for_cached_tokens_is_bounded() -> None:
    memory = homes(max_extra_sessions=2)
    text = memory.keys(range(10_000))
    assert memory.worth(text) == {}
    memory.record("T", text[:4])
    little = memory.worth(text)["T"]
    assert 0 < little < 1
    memory.record("T", text[:8])
    assert memory.worth(text) == {"T": pytest.approx(2 * little)}
    memory.record("U", text)
    assert memory.worth(text) == {"U": 2.0}


def test_a_target_with_less_of_the_text_is_worth_less_by_the_missing_pages() -> None:
    memory = homes(max_extra_sessions=4)
    text = memory.keys(range(10_000))
    memory.record("end", text[-8:])
    memory.record("begin", text[:8])
    eight_pages = memory.worth(text)["begin"]
    memory.record("home", text)
    memory.record("other", text[:-8])
    assert memory.worth(text) == {"home": 4.0, "other": pytest.approx(4.0 - eight_pages)}


def test_the_number_of_hashed_pages_is_bounded_and_keys_differ_by_key() -> None:
    assert 256 <= len(page_keys(KEY, range(100_000), PAGE)) < 20_000
    assert page_keys(KEY, range(9), PAGE) != page_keys(b"other", range(9), PAGE)
    assert page_keys(KEY, range(PAGE), PAGE) == [], "its last token is computed in any case"
    assert page_keys(KEY, (), PAGE) == []


def test_pages_with_another_salt_do_not_match() -> None:
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
