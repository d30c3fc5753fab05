"""Tests the byte limits of messages for unopened sessions; transcripts cover the rest."""

import sys
from types import FrameType

import pytest

from cluster.verification.block_buffer import BufferLimits, OrphanBuffer, TargetCounts
from protos.codec import encoded_bytes
from protos.draft_tree import DraftTree, SparseProbs
from tests.unit.cluster.samples import a_block

TOKENS = (1, 2, 3)
LARGE = a_block((7,), DraftTree.chain(TOKENS, SparseProbs((TOKENS * 300,) * 3, ((1,) * 900,) * 3)), "large")


def test_the_blocks_of_each_drafter_are_bounded_in_bytes():
    counts = TargetCounts()
    early = OrphanBuffer(BufferLimits(bytes=2 * encoded_bytes(LARGE)), counts)
    for _ in range(5):
        early.block("one#1", LARGE, now=0.0)
    early.block("other#1", a_block((7,), TOKENS, "small"), now=0.0)
    assert counts.dropped == {"buffer_full": 2}
    (waiting,) = early.take("large")
    assert len(waiting.blocks) == 3, "the block that passes the bound is the last"


def test_the_blocks_of_all_drafters_are_bounded_however_many_names_a_peer_uses():
    counts = TargetCounts()
    early = OrphanBuffer(BufferLimits(all_bytes=2 * encoded_bytes(LARGE)), counts)
    for number in range(9):
        early.block(f"name {number}#1", LARGE, now=0.0)
    assert counts.dropped == {"buffer_full": 6}
    assert len(early.take("large")) == 9, "their entries are small and kept"


@pytest.mark.parametrize("bound", ["bytes", "all_bytes"])
def test_messages_that_leave_in_any_way_free_their_space(bound):
    counts = TargetCounts()
    early = OrphanBuffer(BufferLimits(age_s=5, **{bound: encoded_bytes(LARGE) - 1}), counts)
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
    assert not any(state for state in vars(early).values() if isinstance(state, dict | list)), "a drafter is remembered"


def test_a_message_costs_the_same_however_many_wait():
    """The test counts calls, because time is unreliable on a busy machine."""
    early = OrphanBuffer(BufferLimits(sessions=10**6), TargetCounts())
    small = a_block((7,), TOKENS, "s")

    def calls_of_a_block() -> int:
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
    few = calls_of_a_block()
    for number in range(300):
        early.block("one#1", a_block((7,), TOKENS, f"other {number}"), now=0.0)
    assert calls_of_a_block() == few
