"""Limits in bytes on one drafter's messages for unopened sessions; the scheduler's tests cover the rest."""

import sys
from types import FrameType

from cluster.verification.block_buffer import BufferLimits, OrphanBuffer, TargetCounts
from protos.codec import encoded_bytes
from protos.draft_tree import DraftTree, SparseProbs
from tests.unit.cluster.samples import a_block

TOKENS = (1, 2, 3)
LARGE = a_block((7,), DraftTree.chain(TOKENS, SparseProbs((TOKENS * 300,) * 3, ((1,) * 900,) * 3)), "large")


def test_a_drafters_blocks_are_bounded_in_bytes_and_others_keep_their_own_room():
    counts = TargetCounts()
    early = OrphanBuffer(BufferLimits(bytes=2 * encoded_bytes(LARGE)), counts)
    for _ in range(5):
        early.block("one#1", LARGE, now=0.0)
    early.block("other#1", a_block((7,), TOKENS, "small"), now=0.0)
    assert counts.dropped == {"buffer_full": 2}
    (waiting,) = early.take("large")
    assert len(waiting.blocks) == 3, "the one that passes the bound is the last"


def test_all_drafters_together_are_bounded_whatever_names_one_goes_by():
    counts = TargetCounts()
    early = OrphanBuffer(BufferLimits(all_bytes=2 * encoded_bytes(LARGE)), counts)
    for number in range(9):
        early.block(f"name {number}#1", LARGE, now=0.0)
    assert counts.dropped == {"buffer_full": 6}
    assert len(early.take("large")) == 9, "their places are kept, which are small"


def test_what_leaves_makes_room_again_whichever_way_it_goes():
    counts = TargetCounts()
    early = OrphanBuffer(BufferLimits(age_s=5, bytes=encoded_bytes(LARGE) - 1), counts)
    for leave in (
        lambda: early.take("large"),
        lambda: early.drafter_gone("one#1"),
        lambda: early.expire(5.0),
    ):
        early.block("one#1", LARGE, now=0.0)
        early.block("one#1", LARGE, now=0.0)
        assert counts.dropped["buffer_full"] == 1
        counts.dropped.clear()
        leave()
    assert len(early) == 0
    held = (early._waiting, early._drafters, early._sessions, +early._bytes)
    assert not any(held), "nothing is remembered of who has nothing here"
    assert early._all_bytes == 0


def test_a_message_costs_the_same_however_many_wait():
    """Counted in what is looked at, for time says nothing on a busy machine."""
    early = OrphanBuffer(BufferLimits(sessions=10**6), TargetCounts())
    small = a_block((7,), TOKENS, "s")

    def looked_at() -> int:
        calls = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            early.block("one#1", small, now=0.0)
        finally:
            sys.setprofile(None)
        return calls

    early.block("one#1", small, now=0.0)
    few = looked_at()
    for number in range(300):
        early.block("one#1", a_block((7,), TOKENS, f"other {number}"), now=0.0)
    assert looked_at() == few
