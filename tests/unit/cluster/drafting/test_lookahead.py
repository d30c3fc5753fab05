"""Tests the lookahead search: order of extension, time limits, and early blocks."""

import math
from collections.abc import Callable, Sequence

import pytest

from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.lookahead import ForwardTime, draft_ahead, proposals
from cluster.drafting.method import dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText
from cluster.drafting.trees import Choices
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Sampling
from protos.prefix import Prefix
from tests.unit.cluster.samples import KEY, an_open

FIRST = 0.7  # probability of the likeliest token at every position
OTHERS = (0.2, 0.09, 0.005)
TOKENS = (0, 1)


class Counting:
    """Model that predicts the next number or, less likely, later numbers; a forward pass takes one second."""

    outcomes = 8

    def __init__(self, **session: object) -> None:
        self._session = session  # Open fields of every session
        self.extended: list[list[tuple[int, ...]]] = []  # outcome of each extended block, by forward pass; root: ()
        self.sessions: list[list[str]] = []

    def clock(self) -> float:
        return float(len(self.extended))

    def roots(self, request: LookaheadRequest) -> list[BlockDraft]:
        block = request.unverified.main_path
        text = SessionText(an_open(request.session, tokens=TOKENS, **self._session), list(TOKENS))
        root = BlockDraft(
            request=request, text=text, base_hash=request.prefix_hash, max_tokens=len(block) + 1, unverified=block
        )
        root.needs_read_for_choices = bool(block)
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


def a_request(session: str = "s", unverified: tuple[int, ...] = (2, 3), until: float = math.inf) -> LookaheadRequest:
    prefix_hash = Prefix(KEY, TOKENS).hash
    return LookaheadRequest(session, len(TOKENS), prefix_hash, 3, DraftTree.chain(unverified), until)


def drafted(
    method: Counting, *requests: LookaheadRequest, interrupted: Callable[[], bool] = lambda: False
) -> list[Proposal]:
    drafts = draft_ahead(method, requests, ForwardTime(), method.clock, interrupted, dismiss)
    return proposals(drafts)


def test_each_likely_outcome_gets_a_block_likeliest_first() -> None:
    found = drafted(Counting(), a_request())
    chances = {(2, 3, 4): FIRST**3, (3,): OTHERS[0], (2, 4): FIRST * OTHERS[0], (2, 3, 5): FIRST**2 * OTHERS[0]}
    assert [proposal.outcome for proposal in found[:4]] == sorted(chances, key=lambda outcome: -chances[outcome])
    assert found[0].tokens == (5, 6, 7)
    assert all((proposal.base_len, proposal.session) == (2 + len(proposal.outcome), "s") for proposal in found)
    assert (5,) not in [proposal.outcome for proposal in found], "too unlikely to draft for"


def test_the_block_under_verification_is_read_first_and_then_the_likeliest_outcome() -> None:
    method = Counting()
    drafted(method, a_request())
    assert method.extended[0] == [()]
    assert method.extended[1][0] == (2, 3, 4)


def test_a_forward_extends_a_bounded_number_of_blocks() -> None:
    """Each session has seven likely outcomes."""
    method = Counting()
    drafted(method, *(a_request(str(session)) for session in range(8)))
    assert 8 <= max(len(rows) for rows in method.extended) <= 32


def test_sessions_share_forwards_and_stop_when_their_verdicts_are_due() -> None:
    method = Counting()
    found = drafted(method, a_request("soon", until=2.0), a_request("late", until=10.0))
    assert set(method.sessions[0]) == {"soon", "late"}
    assert all("soon" not in names for names in method.sessions[2:])
    assert {proposal.session for proposal in found} == {"soon", "late"}


def test_no_forward_starts_that_would_end_too_late() -> None:
    """The time suffices for reading the block and one forward pass of drafts."""
    method = Counting()
    found = drafted(method, a_request(until=2.5))
    assert len(method.extended) == 2
    assert {len(proposal.tokens) for proposal in found} == {1}


@pytest.mark.parametrize("forwards", [0, 1, 2])
def test_an_interruption_ends_the_search_with_the_blocks_so_far(forwards: int) -> None:
    method = Counting()
    found = drafted(method, a_request(), interrupted=lambda: len(method.extended) == forwards)
    assert len(method.extended) == forwards
    assert bool(found) == (forwards > 1)


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_blocks_are_sent_after_each_forward_but_only_whole_ones_under_rejection_sampling(
    acceptance: Acceptance,
) -> None:
    early: list[list[Proposal]] = []
    method = Counting(acceptance=acceptance, sampling=Sampling(temperature=1.0))
    draft_ahead(method, [a_request()], ForwardTime(), method.clock, lambda: False, early.append)
    assert len(early) == len(method.extended)
    lengths = {len(proposal.tokens) for proposals in early for proposal in proposals}
    assert lengths == ({3} if acceptance is Acceptance.REJECTION else {1, 2, 3})


def test_no_block_follows_a_stop_id_or_the_maximum_length() -> None:
    stopped = drafted(Counting(stop_ids=(4,)), a_request())
    assert stopped
    assert not any(4 in proposal.outcome for proposal in stopped)
    full = drafted(Counting(max_len=5), a_request())
    assert {len(proposal.outcome) for proposal in full} == {1}
    assert {len(proposal.tokens) + proposal.base_len for proposal in full} == {4}
