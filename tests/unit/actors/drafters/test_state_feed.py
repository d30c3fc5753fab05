"""The states of sessions, and what a draft head's branches remember of them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from actors.drafters.model.draft_cache import CacheBranch, CachedDraft, DraftCache, FedStates, SessionStates
from cluster.drafting.requests import SessionText
from protos.messages import StatesNeeded
from tests.unit.actors.drafters.drafting_requests import Want
from tests.unit.cluster.samples import an_open


def rows(*values: float) -> Tensor:
    """A row (1,) for each; a true state is the number of its position, a predicted one has a fraction."""
    return torch.tensor(values).unsqueeze(1)


# ---------------------------------------------------------------- one session's rows


def test_rows_are_found_by_position_in_whatever_order_they_came() -> None:
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


# ---------------------------------------------------------------- what branches are fed


class Desk:
    """A cache and a feed, over one session."""

    def __init__(self) -> None:
        self.projected: list[int] = []  # rows each time
        self.cache = DraftCache(16, 4, unfed=1)
        self.feed = FedStates(StatesNeeded((3,), 1), self._project, 100)
        self.feed.open("s")

    def _project(self, raw: Tensor) -> Tensor:
        self.projected.append(len(raw))
        return raw

    def read(self, branch: CacheBranch, tokens: Sequence[int], predicted: Tensor) -> list[float]:
        """The states that `tokens` are fed with; at the last places of them, others are predicted."""
        draft = self.draft(branch, tokens)
        assert self.feed.feedable(draft, len(tokens)) == len(tokens)
        start = len(branch.tokens)
        assert self.cache.feed(branch, tokens, {"s"}) is not None
        found: list[float] = self.feed.states(branch, start, 0).flatten().tolist()
        self.feed.remember(branch, predicted)
        return found

    def draft(self, branch: CacheBranch, tokens: Sequence[int]) -> CachedDraft:
        request = Want(an_open("s"), (1,) * 5, 0, 3).request
        text = SessionText(an_open("s"), [1] * 5)
        return CachedDraft(request=request, text=text, base_hash=0, max_tokens=3, branch=branch, pending=list(tokens))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def drafted(desk: Desk) -> CacheBranch:
    """Five tokens with true states, and two that were drafted after them."""
    desk.feed.put("s", 0, rows(0, 1, 2, 3))
    branch = desk.cache.resume("s", range(10, 15))
    assert desk.read(branch, range(10, 15), rows(4.5)) == [0, 1, 2, 3]
    assert desk.read(branch, [15], rows(5.5)) == [4.5]
    assert desk.read(branch, [16], rows(6.5)) == [5.5]
    assert (branch.exact, sorted(branch.predicted)) == (5, [5, 6, 7])
    return branch


def test_what_was_recycled_is_fed_again_when_the_true_states_are_there(desk: Desk) -> None:
    branch = drafted(desk)
    desk.feed.rewind(desk.cache, branch)
    assert len(branch.tokens) == 7, "nothing is better known yet"
    desk.feed.put("s", 4, rows(4, 5))
    desk.feed.rewind(desk.cache, branch)
    assert branch.tokens == list(range(10, 15))
    assert desk.read(branch, [15, 16, 17], rows(7.5)) == [4, 5, 6.5], "and the rest as before"
    assert (branch.exact, sorted(branch.predicted)) == (7, [7, 8]), "what true states replaced is forgotten"


def test_a_true_state_after_a_recycled_one_makes_nothing_exact(desk: Desk) -> None:
    branch = drafted(desk)
    desk.feed.put("s", 6, rows(6))
    assert desk.read(branch, [17], rows(7.5)) == [6]
    assert branch.exact == 5


def test_a_branch_that_was_cut_is_exact_no_further(desk: Desk) -> None:
    branch = drafted(desk)
    desk.cache.cut(branch, 3)
    assert branch.exact == 3
    forked = desk.cache.fork(branch, 2)
    assert (branch.exact, forked.exact) == (3, 2)


def test_a_fork_goes_on_with_what_its_parent_predicted_and_changes_nothing_of_it(desk: Desk) -> None:
    branch = drafted(desk)
    forked = desk.cache.fork(branch, 6)
    assert desk.read(forked, [20], rows(6.25)) == [5.5]
    assert (float(forked.predicted[7]), float(branch.predicted[7])) == (6.25, 6.5)


def test_what_was_predicted_of_another_text_is_forgotten(desk: Desk) -> None:
    """The state before the first token that differs was predicted from tokens that stand; later ones were not."""
    branch = drafted(desk)
    resumed = desk.cache.resume("s", [*range(10, 15), 20, 21, 22])
    assert resumed is branch
    assert len(branch.tokens) == 5
    assert sorted(branch.predicted) == [5]
    assert desk.feed.feedable(desk.draft(branch, [20, 21, 22]), 3) == 1


def test_a_row_that_comes_twice_is_projected_once(desk: Desk) -> None:
    for first, count in ((0, 3), (0, 3), (1, 2), (2, 2)):
        desk.feed.put("s", first, rows(*range(first, first + count)))
    assert desk.projected == [3, 2]


def test_rows_of_another_width_are_a_mistake(desk: Desk) -> None:
    with pytest.raises(AssertionError, match="rows have 2 elements, not 1"):
        desk.feed.put("s", 0, torch.zeros(1, 2))
