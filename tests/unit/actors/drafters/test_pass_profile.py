"""Tests the measurement of drafting costs through the method's interface."""

from collections.abc import Sequence

import pytest
import torch

from actors.drafters.lookup.ngram import NgramDraft
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.forwards import MaskTokens
from actors.drafters.model.sampling import DraftingLimits
from actors.drafters.pass_profile import profile_drafting
from cluster.drafting.requests import Proposal
from cluster.drafting.session_table import DrafterLimits
from protos.messages import DraftRequest, StateDtype, StatesFormat
from tests.toys import ToyRunner

VOCABULARY = 8


class RecordingMethod(DraftModel):
    """Method that records the block lengths of each pass."""

    def __init__(self, width: int = 1) -> None:
        super().__init__(
            ToyRunner(torch.zeros(VOCABULARY + 1, VOCABULARY)),
            torch.arange(VOCABULARY),
            DraftCache(pages=64, page_size=4),
            DraftingLimits(top_k=2),
            masks=MaskTokens(VOCABULARY, width),
        )
        self.passes: list[list[int]] = []

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = super().draft(requests)
        self.passes.append([len(proposal.tokens) for proposal in proposals])
        return proposals


class Reading(RecordingMethod):
    """Method that drafts from states and asserts that they have arrived."""

    states_format = StatesFormat(4, StateDtype.FLOAT8)

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, int] = {}

    def states(self, session: str, first: int, rows: bytes) -> None:
        assert first == 0
        self.rows[session] = len(rows) // self.states_format.row_bytes

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        assert all(self.rows[request.session] == request.base_len - 1 for request in requests)
        return super().draft(requests)


def test_a_method_that_reads_the_targets_states_is_profiled_with_some():
    method = Reading()
    profile_drafting(method, DrafterLimits(VOCABULARY, max_context=64, max_sessions=2))
    assert method.passes
    assert method.is_idle


@pytest.mark.parametrize("width", [1, 3])
def test_forwards_and_further_tokens_are_measured_separately(width):
    """Blocks reach the requested length even if their tokens are improbable. No session stays open."""
    method = RecordingMethod(width)
    cost = profile_drafting(method, DrafterLimits(VOCABULARY, 100, max_sessions=4))
    assert all(len(set(lengths)) == 1 for lengths in method.passes)
    sizes = {lengths[0] for lengths in method.passes}
    assert {1, width} < sizes
    assert max(sizes) > width
    assert all(size % width == 0 for size in sizes - {1})
    assert cost.tokens_per_forward == width
    assert cost.seconds(1, 1) <= cost.seconds(1, width) < cost.seconds(1, width + 1) == cost.seconds(1, 2 * width)
    rows = [rows for rows, _ in cost.forward.by_tokens]
    assert rows == [rows for rows, _ in cost.further.by_tokens] == sorted({len(lengths) for lengths in method.passes})
    assert rows[0] == 1 < rows[-1] <= 4
    assert method.is_idle


def test_a_method_without_a_model_is_measured_too():
    cost = profile_drafting(NgramDraft(4, 2), DrafterLimits(VOCABULARY, 100, max_sessions=1))
    assert [rows for rows, _ in cost.forward.by_tokens] == [1]
