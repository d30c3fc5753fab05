"""From a checkpoint to a drafting method: the model, and what its folder holds beside it.

Knows nothing of how it drafts.
"""

from collections.abc import Iterable
from pathlib import Path

import torch

from actors.compute.linear import EightBitProjection, can_round, projection
from actors.engine.memory import page_bytes, page_count
from actors.engine.runner import ModelRunner
from actors.methods.draft_model import DraftingLimits, DraftModel
from actors.methods.model.draft_cache import DraftCache
from actors.methods.model.pard import ONE_AT_A_TIME, read_mask_tokens, tokens_per_forward
from actors.methods.model.recurrent_head import load_recurrent_head
from actors.methods.model.vocab_pruning import read_frequent_tokens, reduce_head
from actors.models.checkpoint import load_model
from actors.models.decoder import decoder_for
from cluster.config import CacheConfig
from cluster.errors import ModelError

FURTHER_TOKENS = 8192  # most frequent ones that a recurrent head chooses among: it seldom knows the others


def load_draft_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    cache: CacheConfig,
    sessions: int,
    context: int,
    target_ids: Iterable[int],
    limits: DraftingLimits,
    longest_block: int,
    int8: bool = False,
) -> DraftModel:
    """Loads a checkpoint as a drafting method; ids that the target lacks are never proposed.

    `int8`: products of weights and rows rounded to 8 bits, and float32 beside them. Raises ModelError where
    there are none.
    """
    if int8 and not can_round(device):
        raise ModelError(f"there are no products in 8 bits on {device}; leave draft.quantization out")
    product = EightBitProjection if int8 else projection
    model = load_model(folder, "float32" if int8 else dtype, device)
    rows = int(model.config.get_text_config().vocab_size)
    frequent = read_frequent_tokens(folder, rows)
    known = set(target_ids)
    proposable = [token for token in (range(rows) if frequent is None else frequent) if token in known]
    token_ids = torch.tensor(proposable, device=device)
    if proposable != list(range(rows)):
        reduce_head(model, token_ids)
    width = tokens_per_forward(model.config, longest_block)
    decoder = decoder_for(model.eval(), product)
    columns = None if frequent is None else FURTHER_TOKENS
    further = load_recurrent_head(folder, model, decoder, width, product, columns)
    masks = ONE_AT_A_TIME if further else read_mask_tokens(model.config, longest_block)
    pages = page_count(cache, page_bytes(model, cache.page_size), sessions, context, device)
    runner = ModelRunner(model, pages, cache.page_size, decoder=decoder)
    draft_cache = DraftCache(pages, cache.page_size)
    return DraftModel(runner, token_ids, draft_cache, limits, masks=masks, further=further)
