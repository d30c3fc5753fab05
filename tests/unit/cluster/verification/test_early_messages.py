"""What one drafter may leave for sessions that nobody has opened, in bytes; the scheduler's tests show the rest."""

from cluster.verification.block_buffer import BlockCounts
from cluster.verification.early_messages import BufferLimits, EarlyMessages
from protos.codec import encoded_bytes
from protos.draft_tree import DraftTree, SparseProbs
from tests.unit.cluster.samples import a_block

TOKENS = (1, 2, 3)
LARGE = a_block((7,), DraftTree.chain(TOKENS, SparseProbs((TOKENS * 300,) * 3, ((1,) * 900,) * 3)), "large")


def test_a_drafters_blocks_are_bounded_in_bytes_and_others_keep_their_own_room():
    counts = BlockCounts()
    early = EarlyMessages(BufferLimits(bytes=2 * encoded_bytes(LARGE)), counts)
    for _ in range(5):
        early.block("one#1", LARGE, now=0.0)
    early.block("other#1", a_block((7,), TOKENS, "small"), now=0.0)
    assert counts.dropped == {"buffer_full": 2}
    waiting = early.take("large")
    assert waiting is not None
    assert len(waiting.blocks) == 3, "the one that passes the bound is the last"
