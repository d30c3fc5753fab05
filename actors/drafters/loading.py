"""Creates the draft model from a checkpoint, with the optional files in its folder.

The folder may hold the most frequent tokens, a recurrent head, mask tokens and a published acceptance rate, against
which drafters check themselves.
"""

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from actors.compute.linear import Product
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.forwards import (
    ONE_AT_A_TIME,
    read_frequent_tokens,
    read_mask_tokens,
    reduce_head,
    tokens_per_forward,
)
from actors.drafters.model.recurrent_head import load_recurrent_head
from actors.drafters.model.sampling import Calibration, DraftingLimits
from actors.drafters.products import choose_products
from actors.drafters.registry import DraftSetup
from actors.engine.memory import page_bytes, page_count
from actors.engine.process import device_of
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import check_draft, load_model, local_folder
from actors.models.decoder import decoder_for
from actors.models.layer_subset import context_length
from cluster.config import DraftPool
from cluster.errors import ModelError

HEAD_TOKENS = 8192  # a recurrent head chooses among the most frequent tokens: it rarely predicts others


def create(draft: DraftPool, setup: DraftSetup) -> DraftModel:
    """Creates the method. Raises ModelError if the model does not fit the target's vocabulary or the device."""
    assert draft.model is not None, "a configuration whose method asks a model has one"
    folder = local_folder(draft.model)
    check_draft(setup.target_tokens, folder)
    return load_draft_model(folder, draft, setup, device_of(draft.resources))


def load_draft_model(
    folder: Path, draft: DraftPool, setup: DraftSetup, device: torch.device, calibration: Calibration | None = None
) -> DraftModel:
    """Loads a checkpoint as a drafting method; ids that the target lacks are never proposed."""
    products = choose_products(draft.draft_model.quantization, setup.dtype, device)
    model = load_model(folder, products.dtype_name, device)
    return draft_with(model, products.product, draft, setup, folder, calibration)


def draft_with(
    model: PreTrainedModel,
    product: Product,
    draft: DraftPool,
    setup: DraftSetup,
    beside: Path | None = None,
    calibration: Calibration | None = None,
) -> DraftModel:
    """Drafts with a model, sped up by the files in its folder `beside`: frequent tokens and a recurrent head."""
    options = draft.draft_model
    rows = int(model.config.get_text_config().vocab_size)
    frequent = read_frequent_tokens(beside, rows) if beside else None
    proposable = [token for token in (range(rows) if frequent is None else frequent) if token in setup.target_tokens]
    token_ids = torch.tensor(proposable, device=model.device)
    if proposable != list(range(rows)):
        reduce_head(model, token_ids)
    width = tokens_per_forward(model.config, setup.draft_tokens)
    decoder = decoder_for(model.eval(), product, setup.max_context)
    columns = None if frequent is None else HEAD_TOKENS
    head = load_recurrent_head(beside, model, decoder, width, product, columns) if beside else None
    masks = ONE_AT_A_TIME if head or not beside else read_mask_tokens(model.config, setup.draft_tokens)
    page_size = draft.cache.page_size
    bytes_each = page_bytes(model, page_size)
    share = draft.resources.gpu_share
    pages = page_count(draft.cache, bytes_each, draft.max_sessions, setup.max_context, model.device, share)
    runner = ModelRunner(model, pages, page_size, decoder=decoder, context=setup.max_context)
    draft_cache = DraftCache(pages, page_size)
    limits = DraftingLimits(
        options.draft_probs_top_k, options.min_confidence, max_positions=context_length(model.config)
    )
    return DraftModel(
        runner, token_ids, draft_cache, limits, masks=masks, head=head, calibration=calibration, makers=setup.makers
    )


FIGURE = "first_token_acceptance"


def published_acceptance(draft: DraftPool) -> float | None:
    """Returns the share of blocks whose first token the target accepts, from the draft's config.json.

    None if config.json does not state it. Raises ModelError if the value is not a share in (0, 1].
    """
    if draft.model is None:
        return None
    path = local_folder(draft.model, with_weights=False) / "config.json"
    figure = json.loads(path.read_text(encoding="utf-8")).get(FIGURE)
    if figure is None:
        return None
    if not isinstance(figure, int | float) or not 0 < figure <= 1:
        raise ModelError(
            f"{path}: {FIGURE} is {figure!r}, expected a share above 0 and up to 1; correct it or remove it"
        )
    return float(figure)
