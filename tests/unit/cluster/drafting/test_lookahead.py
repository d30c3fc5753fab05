"""Drafting ahead as a search: what is extended first, by when, and what may leave before the end."""

import math
from collections.abc import Callable, Sequence

import pytest

from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.lookahead import AHEAD_ROWS, LEAST_CHANCE, ForwardTime, draft_ahead, proposals
from cluster.drafting.method import dismiss
from cluster.drafting.requests import AheadRequest, Proposal, SessionText
from cluster.drafting.trees import Choices
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Sampling
from protos.prefix import Prefix
from tests.unit.cluster.samples import KEY, an_open

FIRST = 0.7  # chance of the likeliest token at every place, and of the next ones
OTHERS = (0.2, 0.09, 0.005)
TOKENS = (0, 1)


class Counting:
    """Thinks that each token is followed by the next number, and else by those after it. A forward takes a second."""

    outcomes = 8

    def __init__(self, **session: object) -> None:
        self._session = session  # what the Open of every session says
        self.extended: list[list[tuple[int, ...]]] = []  # by forward, the outcome of each block; a root's is ()
        self.sessions: list[list[str]] = []

    def clock(self) -> float:
        return float(len(self.extended))

    def roots(self, request: AheadRequest) -> list[BlockDraft]:
        block = request.unverified.main_path
        text = SessionText(an_open(request.session, tokens=TOKENS, **self._session), list(TOKENS))
        root = BlockDraft(
            request=request, text=text, base_hash=request.prefix_hash, max_tokens=len(block) + 1, unverified=block
        )
        root.tells_all = bool(block)
        return [root]

    def fork(self, root: BlockDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> BlockDraft:
        return root.after(outcome, chance, max_tokens)

    def preview(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None: ...

    def extend(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> list[BlockDraft]:
        self.extended.append([draft.outcome for draft in drafts])
        self.sessions.append([draft.request.session for draft in drafts])
        for draft in drafts:
            for _ in range(draft.missing if draft.is_root else 1):
                _, last = draft.last
                draft.append(last + 1, Choices([last + 1 + more for more in range(4)], (FIRST, *OTHERS)))
            draft.settle()
        return list(drafts)


def a_request(session: str = "s", unverified: tuple[int, ...] = (2, 3), until: float = math.inf) -> AheadRequest:
    prefix_hash = Prefix(KEY, TOKENS).hash
    return AheadRequest(session, len(TOKENS), prefix_hash, 3, DraftTree.chain(unverified), until)


def drafted(
    method: Counting, *requests: AheadRequest, interrupted: Callable[[], bool] = lambda: False
) -> list[Proposal]:
    drafts = draft_ahead(method, requests, ForwardTime(), method.clock, interrupted, dismiss)
    return proposals(drafts)


def test_each_likely_outcome_gets_a_block_likeliest_first() -> None:
    found = drafted(Counting(), a_request())
    chances = {(2, 3, 4): FIRST**3, (3,): OTHERS[0], (2, 4): FIRST * OTHERS[0], (2, 3, 5): FIRST**2 * OTHERS[0]}
    assert [proposal.outcome for proposal in found[:4]] == sorted(chances, key=lambda outcome: -chances[outcome])
    assert found[0].tokens == (5, 6, 7)
    assert all((proposal.base_len, proposal.session) == (2 + len(proposal.outcome), "s") for proposal in found)
    assert OTHERS[-1] < LEAST_CHANCE
    assert (5,) not in [proposal.outcome for proposal in found], "so unlikely that nothing is drafted for it"


def test_the_block_under_verification_is_read_first_then_what_is_likeliest() -> None:
    method = Counting()
    drafted(method, a_request())
    assert method.extended[0] == [()]
    assert method.extended[1][0] == (2, 3, 4)
    assert all(len(rows) <= AHEAD_ROWS for rows in method.extended)


def test_sessions_share_forwards_and_none_goes_on_past_its_verdict() -> None:
    method = Counting()
    found = drafted(method, a_request("soon", until=2.0), a_request("late", until=10.0))
    assert set(method.sessions[0]) == {"soon", "late"}
    assert all("soon" not in names for names in method.sessions[2:])
    assert {proposal.session for proposal in found} == {"soon", "late"}


def test_no_forward_is_begun_that_would_end_too_late() -> None:
    """A forward takes a second: the reading, and one for blocks."""
    method = Counting()
    found = drafted(method, a_request(until=2.5))
    assert len(method.extended) == 2
    assert {len(proposal.tokens) for proposal in found} == {1}


@pytest.mark.parametrize("forwards", [0, 1, 2])
def test_an_interruption_ends_it_with_what_there_is(forwards: int) -> None:
    method = Counting()
    found = drafted(method, a_request(), interrupted=lambda: len(method.extended) == forwards)
    assert len(method.extended) == forwards
    assert bool(found) == (forwards > 1)


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_early_is_told_after_each_forward_and_under_ratio_of_whole_blocks_alone(acceptance: Acceptance) -> None:
    told: list[list[Proposal]] = []
    method = Counting(acceptance=acceptance, sampling=Sampling(temperature=1.0))
    draft_ahead(method, [a_request()], ForwardTime(), method.clock, lambda: False, told.append)
    assert len(told) == len(method.extended)
    lengths = {len(proposal.tokens) for proposals in told for proposal in proposals}
    assert lengths == ({3} if acceptance is Acceptance.REJECTION else {1, 2, 3})


def test_no_block_follows_a_stop_or_the_longest_text() -> None:
    stopped = drafted(Counting(stop_ids=(4,)), a_request())
    assert stopped
    assert not any(4 in proposal.outcome for proposal in stopped)
    full = drafted(Counting(max_len=5), a_request())
    assert {len(proposal.outcome) for proposal in full} == {1}
    assert {len(proposal.tokens) + proposal.base_len for proposal in full} == {4}
