"""Loads a published DFlash head with its target, and creates the drafting method."""

import logging
from collections.abc import Collection
from pathlib import Path

import torch

from actors.compute.linear import Product, projection
from actors.drafters.heads.decoded_states import DecodedStates, decoded
from actors.drafters.heads.dflash.config import resolve_dflash
from actors.drafters.heads.dflash.decoder import DFlashDecoder
from actors.drafters.heads.dflash.drafting import DFlashPredictor
from actors.drafters.heads.dflash.weights import ALIASES, DFlashReader, borrowed_tensors_of
from actors.drafters.heads.files import PICKLES, HeadFiles, folder_to_borrow_from, read_head
from actors.drafters.heads.head_drafter import PredictedDrafting
from actors.drafters.heads.products import head_products
from actors.drafters.heads.rope import rotary_of
from actors.drafters.heads.row_projection import RowProjection
from actors.drafters.heads.target_shape import target_shape
from actors.drafters.model.calibration import Calibration
from actors.drafters.model.limits import DraftingLimits
from actors.drafters.model.sampling import DraftSampler
from actors.drafters.setup import DraftSetup
from actors.engine.process import device_of
from actors.models.checkpoint import local_folder
from actors.sampling.logits.processor_registry import MAKERS
from cluster.config import DraftPool
from protos.states import StatesNeeded

log = logging.getLogger(__name__)
MAX_POSITIONS = 2048  # default if the configuration does not state it; only some RoPE scalings use it


def states_needed(draft: DraftPool, target: Path) -> StatesNeeded:
    """Returns which hidden states the head named by `draft.model` reads."""
    files = _files(draft)
    return resolve_dflash(files, target_shape(target)).needs


def load_projection(draft: DraftPool, target: Path, dtype: str, device: torch.device) -> RowProjection:
    """Loads the projection that the head applies to the target's states first, and no other tensor.

    It is computed in the target's dtype, even if the drafter quantizes the head.
    """
    files = _files(draft)
    config = resolve_dflash(files, target_shape(target))
    return DFlashReader(files, target, config, getattr(torch, dtype), device, projection).row_projection()


def _files(draft: DraftPool) -> HeadFiles:
    assert draft.model is not None, "a configuration whose method loads a head names it"
    return read_head(local_folder(draft.model, more=PICKLES)).renamed(ALIASES)


def create(draft: DraftPool, setup: DraftSetup) -> DecodedStates:
    """Creates the method. Raises ModelError if the head named by `draft.model` does not fit the target."""
    assert draft.model is not None, "a configuration whose method loads a head names it"
    device = device_of(draft.resources)
    products = head_products(draft.dflash, setup.dtype, device)
    head = local_folder(draft.model, more=PICKLES)
    target = folder_to_borrow_from(setup.target, borrowed_tensors_of(_files(draft)))
    decoder = load_dflash(head, target, products.dtype, device, setup.target_tokens.keys(), products.product)
    log.info("\n".join(decoder.config.describe()))
    limits = DraftingLimits(draft.dflash.draft_probs_top_k)
    makers = (*MAKERS, *setup.makers)
    sampler = DraftSampler(decoder.token_ids, decoder.config.vocabulary, limits, Calibration(), makers)
    is_projected = draft.states.projects_at_target(decoder.config.needs)
    return decoded(PredictedDrafting(DFlashPredictor(decoder, sampler, is_projected), sampler), setup.states)


def load_dflash(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int],
    product: Product = projection,
) -> DFlashDecoder:
    """Loads a published head, with the target's embedding and LM head where it has none of its own."""
    files = read_head(folder).renamed(ALIASES)
    config = resolve_dflash(files, target_shape(target_folder))
    weights = DFlashReader(files, target_folder, config, dtype, device, product).weights(proposable)
    positions = files.config.get("max_position_embeddings") or MAX_POSITIONS
    rotary = rotary_of(config.rope, config.head_dim, positions).to(device)
    return DFlashDecoder(config, weights, rotary)
