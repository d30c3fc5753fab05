"""Toy sessions, runners and draft models shared by tests."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actors.attention.batch import never
from actors.compute.kv_cache import InputRow
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel, InterruptibleRunner
from actors.drafters.model.sampling import DraftingLimits
from actors.grammars import GrammarCompiler
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.page_allocator import PageCopy, SlotMove
from cluster.routing.ledger import Generation
from protos.messages import Acceptance, Sampling

GENERATION = Generation("session", (1, 2, 3), 43, (), Sampling(), 1, 2, 0, 3, Acceptance.COUPLED, 4)


def a_generation(**changes: Any) -> Generation:
    """Returns a 40-token generation with the given fields replaced."""
    return replace(GENERATION, **changes)


class ToyRunner:
    """Runner over a logits table, (vocabulary, vocabulary), indexed by last and next token."""

    def __init__(self, table: Tensor) -> None:
        self.vocabulary = int(table.shape[0])
        self._table = table

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        tokens = [token for row in rows for token in row.tokens[len(row.tokens) - row.logits :]]
        return ForwardOutput(self._table[torch.tensor(tokens, dtype=torch.int64)], None)

    def read_states(self, slots: Sequence[int]) -> bytes:
        raise NotImplementedError("a table has no hidden states")


def toy_draft_model(
    runner: InterruptibleRunner,
    pages: int,
    page_size: int,
    vocabulary: int | None = None,  # default: the runner's
    top_k: int | None = None,  # default: the whole vocabulary
    weight_scale: int = 60_000,
    grammars: GrammarCompiler | None = None,
    **options: Any,
) -> DraftModel:
    """Returns a drafting method over a toy runner; `options` go to its constructor."""
    columns = vocabulary or runner.vocabulary
    return DraftModel(
        runner,
        torch.arange(columns),
        DraftCache(pages, page_size),
        DraftingLimits(top_k=top_k or columns, weight_scale=weight_scale),
        processor_factories=() if grammars is None else (grammars.draft_masking,),
        **options,
    )
