"""A draft model's cache: branches of sessions over one pool, all of which can be recomputed."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.drafters.model.draft_cache import CacheBranch, DraftCache
from tests.unit.cluster.token_memory import TokenMemory

PAGE_SIZE = 4


class Desk:
    """A cache whose pages are memory, read whole at every feed."""

    def __init__(self, pages: int = 16) -> None:
        self.cache = DraftCache(pages, PAGE_SIZE)
        self._memory = TokenMemory(PAGE_SIZE)

    def feed(self, branch: CacheBranch, *tokens: int, busy: Sequence[str] = ()) -> bool:
        """Returns whether there was room; checks that the branch's pages hold its tokens."""
        fed = self.cache.feed(branch, tokens, {branch.session, *busy})
        if fed is None:
            return False
        row, copies = fed
        self._memory.copy(copies)
        self._memory.write(row.tokens, row.start, row.pages)
        assert row.logits == 1
        assert self._memory.read(row.end, row.pages) == tuple(branch.tokens)
        self.cache.check()
        return True

    def opened(self, session: str, tokens: Sequence[int]) -> CacheBranch:
        """A session with all of `tokens` cached."""
        branch = self.cache.resume(session, tokens)
        assert self.feed(branch, *tokens[len(branch.tokens) :])
        return branch


def test_a_session_resumes_where_it_agrees_and_the_last_token_is_always_fed():
    desk = Desk()
    desk.opened("s", (1, 2, 3, 4, 5))
    for tokens, cached in [((1, 2, 3, 4, 5, 6), 5), ((1, 2, 3), 2), ((1, 9, 3), 1), ((1, 9, 3), 2), ((7,), 0)]:
        branch = desk.cache.resume("s", tokens)
        assert tuple(branch.tokens) == tokens[:cached]
        assert desk.feed(branch, *tokens[cached:])


def test_a_text_that_begins_in_its_middle_takes_places_from_there_on():
    """Also after it was forgotten; the token that it begins with is not fed."""
    cache = DraftCache(8, PAGE_SIZE, unfed=1)
    tokens = [9, 9, 9, 1, 2, 3, 4]
    for _ in range(2):
        branch = cache.resume("s", tokens, first=3)
        assert (branch.tokens, branch.first, branch.exact) == ([9, 9, 9], 3, 3)
        fed = cache.feed(branch, [1, 2, 3], {"s"})
        assert fed is not None
        assert (fed[0].tokens, fed[0].start, fed[0].end) == ((2, 3), 0, 2)
        forked = cache.fork(branch, 5)
        fed = cache.feed(forked, [7], {"s"})
        assert fed is not None
        assert (fed[0].tokens, fed[0].start) == ((7,), 1)
        resumed = cache.resume("s", tokens, first=3)
        assert resumed is branch
        fed = cache.feed(branch, [4], {"s"})
        assert fed is not None
        assert (fed[0].tokens, fed[0].start) == ((4,), 2)
        cache.check()
        cache.close("s")
    assert cache.is_idle


def test_the_branch_that_guessed_best_goes_on_and_the_others_give_their_pages_back():
    desk = Desk(pages=4)
    root = desk.opened("s", (1, 2, 3, 4, 5, 6))
    right = desk.cache.fork(root, 6)
    wrong = desk.cache.fork(root, 5)
    assert desk.feed(right, 7)
    assert desk.feed(wrong, 8, 8, 8)
    assert not desk.feed(desk.cache.fork(root, 6), 9), "every page is in use"
    found = desk.cache.resume("s", (1, 2, 3, 4, 5, 6, 7, 7, 7))
    assert found is right
    assert found.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert desk.feed(found, *[7] * 9), "what the others held is free again"


def test_branches_do_not_see_each_other():
    """Fed in turn, on pages of which they share all but the last."""
    desk = Desk()
    root = desk.opened("s", (1, 2, 3, 4, 5, 6))
    branches = [desk.cache.fork(root, length) for length in (6, 5, 4, 2)]
    for token in range(6):
        for number, branch in enumerate(branches):
            assert desk.feed(branch, 10 * number + token)
    assert desk.feed(root, 60)
    assert root.tokens == [1, 2, 3, 4, 5, 6, 60]


def test_a_dry_pool_forgets_whoever_was_not_resumed_for_longest_but_nobody_who_is_busy():
    desk = Desk(pages=3)
    for name in "abc":
        desk.opened(name, (1, 2))
    desk.cache.resume("a", (1, 2, 3))
    new = desk.cache.resume("d", (1, 2))
    assert desk.feed(new, 1, 2, busy=("b",))
    cached = {name: len(desk.cache.resume(name, (1, 2, 3)).tokens) for name in "abd"}
    assert cached == {"a": 2, "b": 2, "d": 2}
    assert desk.cache.resume("c", (1, 2, 3)).tokens == []
    assert not desk.feed(desk.cache.resume("c", (1, 2)), 1, 2, busy=("a", "b", "d"))
    assert desk.feed(desk.cache.resume("c", (1, 2)), 1, 2, busy=("a", "b")), "a refusal changed nothing"


def test_a_feed_that_finds_no_room_leaves_its_branch_as_it_was():
    desk = Desk(pages=2)
    branch = desk.opened("s", (1, 2, 3))
    assert not desk.feed(branch, *range(6))
    assert branch.tokens == [1, 2, 3]
    assert desk.feed(branch, 4, 5)


def test_published_pages_serve_sessions_that_begin_alike_even_when_their_owner_is_gone():
    desk = Desk()
    tokens = tuple(range(10))
    branch = desk.opened("s", tokens)
    desk.cache.publish(branch, 9)
    assert desk.cache.resume("t", tokens).tokens == list(tokens[: 2 * PAGE_SIZE])
    desk.cache.close("s")
    assert desk.cache.resume("u", (*tokens[:5], 99, 99)).tokens == list(tokens[:PAGE_SIZE])
    assert desk.cache.resume("v", tokens[: 2 * PAGE_SIZE]).tokens == list(tokens[:PAGE_SIZE]), "one token must be fed"


def test_what_is_not_cached_is_not_published():
    """A block may end before its session's decided tokens are all fed."""
    desk = Desk()
    branch = desk.opened("s", tuple(range(6)))
    desk.cache.publish(branch, 12)
    assert len(desk.cache.resume("t", tuple(range(12))).tokens) == PAGE_SIZE


def test_closing_forgets_all_branches_and_ignores_the_unknown():
    desk = Desk(pages=2)
    root = desk.opened("s", (1, 2, 3))
    desk.feed(desk.cache.fork(root, 3), 9)
    assert not desk.cache.is_idle
    desk.cache.close("s")
    desk.cache.close("s")
    desk.cache.close("unknown")
    assert desk.cache.is_idle
    desk.cache.check()
    desk.opened("t", tuple(range(8)))


def test_the_check_notices_a_page_that_is_lost():
    desk = Desk()
    branch = desk.opened("s", (1, 2, 3))
    desk.cache._allocator._sessions[branch.name].table.pop()
    with pytest.raises(AssertionError):
        desk.cache.check()


@given(st.data())
def test_whatever_is_resumed_forked_fed_and_closed_every_branch_reads_its_own_tokens(data):
    """Uses a pool so small that sessions are often evicted; `Desk` reads every branch at every feed."""
    desk = Desk(pages=data.draw(st.integers(2, 8)))
    token = st.integers(0, 1)  # few, so that texts agree for long
    branches: dict[str, list[CacheBranch]] = {}
    for _ in range(60):
        name = data.draw(st.sampled_from("abc"))
        action = data.draw(st.sampled_from(["resume", "fork", "feed", "feed", "publish", "close"]))
        held = desk.cache._branches
        branches = {session: known for session, known in branches.items() if session in held}
        if action == "resume" or name not in branches:
            branches[name] = [desk.cache.resume(name, data.draw(st.lists(token, min_size=1, max_size=12)))]
        elif action == "close":
            desk.cache.close(name)
        else:
            branch = data.draw(st.sampled_from(branches[name]))
            if action == "fork" and branch.tokens:
                branches[name].append(desk.cache.fork(branch, data.draw(st.integers(1, len(branch.tokens)))))
            elif action == "publish":
                desk.cache.publish(branch, data.draw(st.integers(0, 12)))
            elif len(branch.tokens) < 12:
                desk.feed(branch, *data.draw(st.lists(token, min_size=1, max_size=3)))
        desk.cache.check()
    for name in "abc":
        desk.cache.close(name)
    assert desk.cache.is_idle
    desk.cache.check()
