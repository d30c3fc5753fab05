"""Toy sessions and draft models that all test worlds share."""

from dataclasses import replace
from typing import Any

import torch

from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel, InterruptibleRunner
from actors.drafters.model.sampling import DraftingLimits
from actors.grammars import GrammarCompiler
from cluster.routing.ledger import Generation
from protos.messages import Acceptance, Sampling

GENERATION = Generation("session", (1, 2, 3), 43, (), Sampling(), 1, 2, 0, 3, Acceptance.COUPLED, 4)


def a_generation(**changes: Any) -> Generation:
    """Returns a session of 40 tokens, with these fields changed."""
    return replace(GENERATION, **changes)


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
    """Returns a drafting method over a toy runner; `options` are the constructor's."""
    columns = vocabulary or runner.vocabulary
    return DraftModel(
        runner,
        torch.arange(columns),
        DraftCache(pages, page_size),
        DraftingLimits(top_k=top_k or columns, weight_scale=weight_scale),
        makers=() if grammars is None else (grammars.draft_masking,),
        **options,
    )
