"""Tests counts of verified blocks by conditions that may break drafts."""

from cluster.draft_quality import AcceptanceStats, BlockKind, kind_of
from cluster.speculation.estimators import AcceptanceCounts


def test_contexts_are_grouped_by_octave():
    assert [kind_of(length, True).context for length in (1, 2, 3, 4, 1023, 1024)] == [1, 2, 2, 4, 512, 1024]


def test_blocks_are_counted_by_drafter_context_and_cached_prefix():
    tally = AcceptanceStats()
    tally.block_verified("a", kind_of(600, True), requested=2, accepted=1)
    tally.block_verified("a", kind_of(700, True), requested=2, accepted=2)
    tally.block_verified("a", kind_of(600, False), requested=1, accepted=0)
    tally.block_verified("b", kind_of(600, True), requested=1, accepted=1)
    assert tally.counts == {
        "a": {
            BlockKind(512, True): AcceptanceCounts((2, 2), (2, 1)),
            BlockKind(512, False): AcceptanceCounts((1,), (0,)),
        },
        "b": {BlockKind(512, True): AcceptanceCounts((1,), (1,))},
    }


def test_only_the_most_recent_drafters_are_kept():
    tally = AcceptanceStats()
    for index in range(1000):
        for drafter in (f"d{index}", "busy"):
            tally.block_verified(drafter, kind_of(1, False), 1, 1)
    assert {"busy", "d999", "d990"} <= tally.counts.keys()
    assert "d0" not in tally.counts
    assert len(tally.counts) < 500
