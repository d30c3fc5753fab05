"""Cost of drafting, measured through the method's own interface."""

from collections.abc import Sequence

import torch

from actors.drafters.lookup.ngram import NgramDraft
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.forwards import MaskTokens
from actors.drafters.model.sampling import DraftingLimits
from actors.drafters.pass_profile import LONG, ROWS, profile_drafting
from actors.models.decoder import ToyRunner
from cluster.drafting.requests import Proposal
from cluster.drafting.session_table import DrafterLimits
from protos.messages import DraftRequest, StateDtype, StatesFormat

VOCABULARY = 8


class Noting(DraftModel):
    """Keeps the lengths of the blocks of each pass."""

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


class Reading(Noting):
    """Drafts from states that it has to have by then."""

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


def test_blocks_have_the_length_asked_for_and_nothing_is_left_behind():
    """However unlikely their tokens: a method that stops in doubt would be measured at nothing."""
    method = Noting()
    cost = profile_drafting(method, DrafterLimits(VOCABULARY, 100, max_sessions=4))
    assert {len(lengths) for lengths in method.passes} == {1, 4}
    assert max(method.passes) == [LONG] * 4
    assert [rows for rows, _ in cost.forward.by_tokens] == [rows for rows in ROWS if rows <= 4]
    assert method.is_idle


def test_a_forward_and_the_further_tokens_that_it_names_are_told_apart():
    method = Noting(width=3)
    cost = profile_drafting(method, DrafterLimits(VOCABULARY, 100, max_sessions=4))
    assert cost.tokens_per_forward == 3
    assert cost.seconds(1, 1) <= cost.seconds(1, 3) < cost.seconds(1, 4) == cost.seconds(1, 6)
    assert {lengths[0] for lengths in method.passes} == {1, 3, 3 * LONG}
    assert max(method.passes) == [3 * LONG] * 4
    assert [rows for rows, _ in cost.further.by_tokens] == [rows for rows, _ in cost.forward.by_tokens]


def test_a_method_without_a_model_is_measured_too():
    cost = profile_drafting(NgramDraft(4, 2), DrafterLimits(VOCABULARY, 100, max_sessions=1))
    assert [rows for rows, _ in cost.forward.by_tokens] == [1]
