"""vLLM's second runner gets the drafts of a step in one copy, and the logits processor the step's layout."""

from types import SimpleNamespace

import torch

from actors.vllm_engine.coupled_sampler import FedBlock
from actors.vllm_engine.worker import fed_blocks, write_drafts


def test_drafts_of_several_lengths_lie_at_the_beginning_of_their_rows() -> None:
    table = torch.full((4, 3), 9)
    write_drafts(table, {2: (5, 6), 0: (7,)})
    assert table[0, :1].tolist() == [7]
    assert table[2, :2].tolist() == [5, 6]
    assert table[[1, 3]].tolist() == [[9, 9, 9], [9, 9, 9]]
    assert table[:, 2].tolist() == [9, 9, 9, 9]


def test_a_step_without_drafts_changes_no_row() -> None:
    table = torch.full((2, 3), 9)
    write_drafts(table, {})
    assert table.tolist() == [[9, 9, 9], [9, 9, 9]]


def test_a_block_begins_after_the_committed_tokens() -> None:
    """One request verifies two tokens, one decodes, one reads a part of its prompt."""
    step = SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(req_ids=["verifying", "plain"], num_computed_tokens=[10, 20]),
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=16)],
        scheduled_spec_decode_tokens={"verifying": [5, 6]},
        num_scheduled_tokens={"verifying": 3, "plain": 1, "new": 32},
    )
    assert fed_blocks(step) == {
        "verifying": FedBlock(11, (5, 6)),
        "plain": FedBlock(21, ()),
        "new": FedBlock(48, ()),
    }
