"""Drafting ahead as a search: what is extended first, by when, and what may leave before the end."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cluster.drafting.ahead import AHEAD_ROWS, LEAST_CHANCE, draft_ahead, proposals
from cluster.drafting.block_draft import BlockDraft
from cluster.drafting.forward_time import ForwardTime
from cluster.drafting.method import dismiss
from cluster.drafting.outcomes import Choices
from cluster.drafting.requests import Proposal, Want
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Sampling
from protos.prefix import Prefix, hashes_after
from tests.unit.cluster.samples import KEY, an_open

FIRST = 0.7  # chance of the likeliest token at every place, and of the next ones
OTHERS = (0.2, 0.09, 0.005)


class Counting:
    """Thinks that each token is followed by the next number, and else by those after it. A forward takes a second."""

    outcomes = 8

    def __init__(self) -> None:
        self.extended: list[list[tuple[int, ...]]] = []  # by forward, the outcome of each block; a root's is ()
        self.sessions: list[list[str]] = []

    def clock(self) -> float:
        return float(len(self.extended))

    def roots(self, want: Want) -> list[BlockDraft]:
        block = (want.unverified or NO_TREE).trunk
        root = BlockDraft(want=want, base_hash=want.prefix_hash, max_tokens=len(block) + 1, unverified=block)
        root.tells_all = bool(block)
        return [root]

    def fork(self, root: BlockDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> BlockDraft:
        base_hash = hashes_after(root.want.prefix_hash, outcome)[-1]
        return BlockDraft(want=root.want, base_hash=base_hash, max_tokens=max_tokens, outcome=outcome, chance=chance)

    def preview(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None: ...

    def extend(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> list[BlockDraft]:
        self.extended.append([draft.outcome for draft in drafts])
        self.sessions.append([draft.want.open.session for draft in drafts])
        for draft in drafts:
            for _ in range(draft.missing if draft.is_root else 1):
                _, last = draft.last
                draft.append(last + 1, Choices([last + 1 + more for more in range(4)], (FIRST, *OTHERS)))
            draft.settle()
        return list(drafts)


def a_want(session: str = "s", unverified: tuple[int, ...] = (2, 3), **changes: object) -> Want:
    tokens = (0, 1)
    return replace(
        Want(an_open(session, tokens=tokens), tokens, Prefix(KEY, tokens).hash, 3, DraftTree.chain(unverified)),
        **changes,
    )


def drafted(method: Counting, *wants: Want, interrupted: Callable[[], bool] = lambda: False) -> list[Proposal]:
    drafts = draft_ahead(method, wants, ForwardTime(), method.clock, interrupted, dismiss)
    return proposals(drafts)


def test_each_likely_outcome_gets_a_block_likeliest_first() -> None:
    found = drafted(Counting(), a_want())
    chances = {(2, 3, 4): FIRST**3, (3,): OTHERS[0], (2, 4): FIRST * OTHERS[0], (2, 3, 5): FIRST**2 * OTHERS[0]}
    assert [proposal.outcome for proposal in found[:4]] == sorted(chances, key=lambda outcome: -chances[outcome])
    assert found[0].tokens == (5, 6, 7)
    assert all((proposal.base_len, proposal.session) == (2 + len(proposal.outcome), "s") for proposal in found)
    assert OTHERS[-1] < LEAST_CHANCE
    assert (5,) not in [proposal.outcome for proposal in found], "so unlikely that nothing is drafted for it"


def test_the_block_under_verification_is_read_first_then_what_is_likeliest() -> None:
    method = Counting()
    drafted(method, a_want())
    assert method.extended[0] == [()]
    assert method.extended[1][0] == (2, 3, 4)
    assert all(len(rows) <= AHEAD_ROWS for rows in method.extended)


def test_sessions_share_forwards_and_none_goes_on_past_its_verdict() -> None:
    method = Counting()
    found = drafted(method, a_want("soon", until=2.0), a_want("late", until=10.0))
    assert set(method.sessions[0]) == {"soon", "late"}
    assert all("soon" not in names for names in method.sessions[2:])
    assert {proposal.session for proposal in found} == {"soon", "late"}


def test_no_forward_is_begun_that_would_end_too_late() -> None:
    """A forward takes a second: the reading, and one for blocks."""
    method = Counting()
    found = drafted(method, a_want(until=2.5))
    assert len(method.extended) == 2
    assert {len(proposal.tokens) for proposal in found} == {1}


@pytest.mark.parametrize("forwards", [0, 1, 2])
def test_an_interruption_ends_it_with_what_there_is(forwards: int) -> None:
    method = Counting()
    found = drafted(method, a_want(), interrupted=lambda: len(method.extended) == forwards)
    assert len(method.extended) == forwards
    assert bool(found) == (forwards > 1)


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_early_is_told_after_each_forward_and_under_ratio_of_whole_blocks_alone(acceptance: Acceptance) -> None:
    told: list[list[Proposal]] = []
    method = Counting()
    want = a_want()
    request = replace(want.open, acceptance=acceptance, sampling=Sampling(temperature=1.0))
    draft_ahead(method, [replace(want, open=request)], ForwardTime(), method.clock, lambda: False, told.append)
    assert len(told) == len(method.extended)
    lengths = {len(proposal.tokens) for proposals in told for proposal in proposals}
    assert lengths == ({3} if acceptance is Acceptance.RATIO else {1, 2, 3})


def test_no_block_follows_a_stop_or_the_longest_text() -> None:
    want = a_want()
    stopped = drafted(Counting(), replace(want, open=replace(want.open, stop_ids=(4,))))
    assert stopped
    assert not any(4 in proposal.outcome for proposal in stopped)
    full = drafted(Counting(), replace(want, open=replace(want.open, max_len=5)))
    assert {len(proposal.outcome) for proposal in full} == {1}
    assert {len(proposal.tokens) + proposal.base_len for proposal in full} == {4}
