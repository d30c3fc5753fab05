"""Tests a draft model's cache and a head's input states, for sessions and their branches."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.drafters.model.draft_cache import CacheBranch, CachedDraft, DraftCache, FedStates, SessionStates
from cluster.drafting.requests import SessionText
from protos.messages import StatesNeeded
from tests.unit.actors.drafters.drafting import wanted_block
from tests.unit.cluster.samples import an_open
from tests.unit.cluster.token_memory import TokenMemory

PAGE_SIZE = 4


class CacheHarness:
    """Cache over simulated pages, which every feed reads in full."""

    def __init__(self, pages: int = 16) -> None:
        self.cache = DraftCache(pages, PAGE_SIZE)
        self.memory = TokenMemory(PAGE_SIZE)

    def feed(self, branch: CacheBranch, *tokens: int, busy: Sequence[str] = ()) -> bool:
        """Returns whether the cache had space; asserts that the branch's pages hold its tokens."""
        fed = self.cache.feed(branch, tokens, {branch.session, *busy})
        if fed is None:
            return False
        row, copies = fed
        self.memory.copy(copies)
        self.memory.write(row.tokens, row.start, row.pages)
        assert row.logits == 1
        assert self.memory.read(row.end, row.pages) == tuple(branch.tokens)
        self.cache.check()
        return True

    def opened(self, session: str, tokens: Sequence[int]) -> CacheBranch:
        """Returns a session with all of `tokens` cached."""
        branch = self.cache.resume(session, tokens)
        assert self.feed(branch, *tokens[len(branch.tokens) :])
        return branch


def test_a_session_resumes_where_it_agrees_and_the_last_token_is_always_fed():
    harness = CacheHarness()
    harness.opened("s", (1, 2, 3, 4, 5))
    for tokens, cached in [((1, 2, 3, 4, 5, 6), 5), ((1, 2, 3), 2), ((1, 9, 3), 1), ((1, 9, 3), 2), ((7,), 0)]:
        branch = harness.cache.resume("s", tokens)
        assert tuple(branch.tokens) == tokens[:cached]
        assert harness.feed(branch, *tokens[cached:])


def test_a_text_with_late_states_uses_positions_from_their_start():
    """This also holds after eviction; the text's first token is not fed."""
    cache = DraftCache(8, PAGE_SIZE, unfed=1)
    tokens = [9, 9, 9, 1, 2, 3, 4]
    for _ in range(2):
        branch = cache.resume("s", tokens, first=3)
        assert (branch.tokens, branch.first, branch.exact) == ([9, 9, 9], 3, 3)
        fed = cache.feed(branch, [1, 2, 3], {"s"})
        assert (fed[0].tokens, fed[0].start, fed[0].end) == ((2, 3), 0, 2)
        forked = cache.fork(branch, 5)
        fed = cache.feed(forked, [7], {"s"})
        assert (fed[0].tokens, fed[0].start) == ((7,), 1)
        resumed = cache.resume("s", tokens, first=3)
        assert resumed is branch
        fed = cache.feed(branch, [4], {"s"})
        assert (fed[0].tokens, fed[0].start) == ((4,), 2)
        cache.check()
        cache.close("s")
    assert cache.is_idle


def test_the_best_branch_continues_and_the_others_free_their_pages():
    harness = CacheHarness(pages=4)
    root = harness.opened("s", (1, 2, 3, 4, 5, 6))
    right = harness.cache.fork(root, 6)
    wrong = harness.cache.fork(root, 5)
    assert harness.feed(right, 7)
    assert harness.feed(wrong, 8, 8, 8)
    assert not harness.feed(harness.cache.fork(root, 6), 9), "every page is in use"
    found = harness.cache.resume("s", (1, 2, 3, 4, 5, 6, 7, 7, 7))
    assert found is right
    assert found.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert harness.feed(found, *[7] * 9), "what the others held is free again"


def test_a_dry_pool_evicts_the_least_recently_resumed_session_that_is_not_busy():
    harness = CacheHarness(pages=3)
    for name in "abc":
        harness.opened(name, (1, 2))
    harness.cache.resume("a", (1, 2, 3))
    new = harness.cache.resume("d", (1, 2))
    assert harness.feed(new, 1, 2, busy=("b",))
    cached = {name: len(harness.cache.resume(name, (1, 2, 3)).tokens) for name in "abd"}
    assert cached == {"a": 2, "b": 2, "d": 2}
    assert harness.cache.resume("c", (1, 2, 3)).tokens == []
    assert not harness.feed(harness.cache.resume("c", (1, 2)), 1, 2, busy=("a", "b", "d"))
    assert harness.feed(harness.cache.resume("c", (1, 2)), 1, 2, busy=("a", "b")), "a refusal changed nothing"


def test_a_feed_that_finds_no_room_leaves_its_branch_as_it_was():
    harness = CacheHarness(pages=2)
    branch = harness.opened("s", (1, 2, 3))
    assert not harness.feed(branch, *range(6))
    assert branch.tokens == [1, 2, 3]
    assert harness.feed(branch, 4, 5)


def test_published_pages_serve_sessions_with_equal_prefixes_after_their_owner_closes():
    harness = CacheHarness()
    tokens = tuple(range(10))
    branch = harness.opened("s", tokens)
    harness.cache.publish(branch, 9)
    assert harness.cache.resume("t", tokens).tokens == list(tokens[: 2 * PAGE_SIZE])
    harness.cache.close("s")
    assert harness.cache.resume("u", (*tokens[:5], 99, 99)).tokens == list(tokens[:PAGE_SIZE])
    assert harness.cache.resume("v", tokens[: 2 * PAGE_SIZE]).tokens == list(tokens[:PAGE_SIZE]), (
        "one token must be fed"
    )


def test_uncached_tokens_are_not_published():
    """A block may end before all of its session's decided tokens are fed."""
    harness = CacheHarness()
    branch = harness.opened("s", tuple(range(6)))
    harness.cache.publish(branch, 12)
    assert len(harness.cache.resume("t", tuple(range(12))).tokens) == PAGE_SIZE


def test_closing_forgets_all_branches_and_ignores_the_unknown():
    harness = CacheHarness(pages=2)
    root = harness.opened("s", (1, 2, 3))
    harness.feed(harness.cache.fork(root, 3), 9)
    assert not harness.cache.is_idle
    harness.cache.close("s")
    harness.cache.close("s")
    harness.cache.close("unknown")
    assert harness.cache.is_idle
    harness.cache.check()
    harness.opened("t", tuple(range(8)))


@given(st.data())
def test_branches_read_only_their_own_tokens(data):
    """Passes over some of the sessions, whose pages must stay; others are evicted from a pool so small.

    `CacheHarness` reads every branch at every feed.
    """
    harness = CacheHarness(pages=data.draw(st.integers(2, 8)))
    token = st.integers(0, 1)  # few, so that texts have long common prefixes
    for _ in range(8):
        busy = sorted(data.draw(st.sets(st.sampled_from("abc"), min_size=1, max_size=2)))
        branches = {
            name: [harness.cache.resume(name, data.draw(st.lists(token, min_size=1, max_size=12)))] for name in busy
        }
        for _ in range(5):
            branch = data.draw(st.sampled_from(branches[data.draw(st.sampled_from(busy))]))
            action = data.draw(st.sampled_from(["fork", "feed", "feed", "publish"]))
            if action == "fork" and branch.tokens:
                length = data.draw(st.integers(1, len(branch.tokens)))
                branches[branch.session].append(harness.cache.fork(branch, length))
            elif action == "publish":
                harness.cache.publish(branch, data.draw(st.integers(0, 12)))
            elif len(branch.tokens) < 12:
                harness.feed(branch, *data.draw(st.lists(token, min_size=1, max_size=3)), busy=busy)
        harness.cache.check()
        if data.draw(st.booleans()):
            harness.cache.close(busy[0])
            harness.cache.check()
    for name in "abc":
        harness.cache.close(name)
    assert harness.cache.is_idle
    harness.cache.check()


# ---------------------------------------------------------------- states of sessions and branches


def rows(*values: float) -> Tensor:
    """Returns a row (1,) per position; a true state equals its position, a predicted state has a fraction."""
    return torch.tensor(values).unsqueeze(1)


# ---------------------------------------------------------------- one session's rows


def test_rows_are_found_by_position_in_any_order() -> None:
    known = SessionStates()
    assert (known.missing_from(0), known.missing_from(5), 0 in known) == (0, 5, False)
    known.put(3, rows(3, 4))
    known.put(0, rows(0))
    assert [position in known for position in range(6)] == [True, False, False, True, True, False]
    assert [known.missing_from(position) for position in range(6)] == [1, 1, 2, 5, 5, 5]
    known.put(1, rows(1, 2, 3))
    assert (known.missing_from(0), known.rows(0, 5).flatten().tolist()) == (5, [0, 1, 2, 3, 4])


def test_rows_stay_as_their_room_grows() -> None:
    known = SessionStates()
    for position in range(40):
        known.put(position, rows(position))
    assert known.rows(7, 40).flatten().tolist() == list(range(7, 40))


def test_rows_that_begin_in_mid_text_are_found_by_position_too() -> None:
    known = SessionStates(5)
    assert (known.missing_from(5), 5 in known, 2 in known) == (5, False, False)
    known.put(7, rows(7))
    known.put(5, rows(5))
    assert [position in known for position in range(9)] == [False] * 5 + [True, False, True, False]
    assert [known.missing_from(position) for position in (5, 6, 7)] == [6, 6, 8]
    known.put(6, rows(6))
    assert (known.missing_from(5), known.rows(6, 8).flatten().tolist()) == (8, [6, 7])


# ---------------------------------------------------------------- states fed to branches


class FeedHarness:
    """Cache and feed of one session."""

    def __init__(self) -> None:
        self.projected: list[int] = []  # rows per call
        self.cache = DraftCache(16, 4, unfed=1)
        self.feed = FedStates(StatesNeeded((3,), 1), self.project, 100)
        self.feed.open("s")

    def project(self, raw: Tensor) -> Tensor:
        self.projected.append(len(raw))
        return raw

    def read(self, branch: CacheBranch, tokens: Sequence[int], predicted: Tensor) -> list[float]:
        """Returns the states fed with `tokens`; predicts further states at the last places."""
        draft = self.draft(branch, tokens)
        assert self.feed.count_feedable(draft, len(tokens)) == len(tokens)
        start = len(branch.tokens)
        assert self.cache.feed(branch, tokens, {"s"}) is not None
        found: list[float] = self.feed.states(branch, start, 0).flatten().tolist()
        self.feed.store_predicted(branch, predicted)
        return found

    def draft(self, branch: CacheBranch, tokens: Sequence[int]) -> CachedDraft:
        request = wanted_block((1,) * 5).request
        text = SessionText(an_open("s"), [1] * 5)
        return CachedDraft(request=request, text=text, base_hash=0, max_tokens=3, branch=branch, pending=list(tokens))


@pytest.fixture
def harness() -> FeedHarness:
    return FeedHarness()


def drafted(harness: FeedHarness) -> CacheBranch:
    """Returns five tokens with true states, and two tokens drafted after them."""
    harness.feed.put("s", 0, rows(0, 1, 2, 3))
    branch = harness.cache.resume("s", range(10, 15))
    assert harness.read(branch, range(10, 15), rows(4.5)) == [0, 1, 2, 3]
    assert harness.read(branch, [15], rows(5.5)) == [4.5]
    assert harness.read(branch, [16], rows(6.5)) == [5.5]
    assert (branch.exact, sorted(branch.predicted)) == (5, [5, 6, 7])
    return branch


def test_recycled_states_are_replaced_once_true_states_arrive(harness: FeedHarness) -> None:
    branch = drafted(harness)
    harness.feed.rewind(harness.cache, branch)
    assert len(branch.tokens) == 7, "nothing is better known yet"
    harness.feed.put("s", 4, rows(4, 5))
    harness.feed.rewind(harness.cache, branch)
    assert branch.tokens == list(range(10, 15))
    assert harness.read(branch, [15, 16, 17], rows(7.5)) == [4, 5, 6.5], "and the rest as before"
    assert (branch.exact, sorted(branch.predicted)) == (7, [7, 8]), "what true states replaced is forgotten"


def test_a_true_state_after_a_recycled_one_is_not_exact(harness: FeedHarness) -> None:
    branch = drafted(harness)
    harness.feed.put("s", 6, rows(6))
    assert harness.read(branch, [17], rows(7.5)) == [6]
    assert branch.exact == 5


def test_a_branch_that_was_cut_is_exact_no_further(harness: FeedHarness) -> None:
    branch = drafted(harness)
    harness.cache.cut(branch, 3)
    assert branch.exact == 3
    forked = harness.cache.fork(branch, 2)
    assert (branch.exact, forked.exact) == (3, 2)


def test_a_fork_continues_its_parents_predictions_without_changing_them(harness: FeedHarness) -> None:
    branch = drafted(harness)
    forked = harness.cache.fork(branch, 6)
    assert harness.read(forked, [20], rows(6.25)) == [5.5]
    assert (float(forked.predicted[7]), float(branch.predicted[7])) == (6.25, 6.5)


def test_predictions_for_another_text_are_dropped(harness: FeedHarness) -> None:
    """Only the state before the first differing token was predicted from the new text."""
    branch = drafted(harness)
    resumed = harness.cache.resume("s", [*range(10, 15), 20, 21, 22])
    assert resumed is branch
    assert len(branch.tokens) == 5
    assert sorted(branch.predicted) == [5]
    assert harness.feed.count_feedable(harness.draft(branch, [20, 21, 22]), 3) == 1


def test_a_row_that_comes_twice_is_projected_once(harness: FeedHarness) -> None:
    for first, count in ((0, 3), (0, 3), (1, 2), (2, 2)):
        harness.feed.put("s", first, rows(*range(first, first + count)))
    assert harness.projected == [3, 2]


def test_rows_of_another_width_are_a_mistake(harness: FeedHarness) -> None:
    with pytest.raises(AssertionError, match="rows have 2 elements, not 1"):
        harness.feed.put("s", 0, torch.zeros(1, 2))
