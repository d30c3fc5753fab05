"""Drafting with an EAGLE head, a draft model that reads the target's hidden states in addition to tokens."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from actors.attention import AttentionBackend
from actors.compute.linear import projection
from actors.drafters.heads.eagle.config import EagleConfig, WeightSource, canonical, overrides_of, resolve
from actors.drafters.heads.eagle.loading import EagleHead, EagleRunner, head_of
from actors.drafters.heads.eagle.weights import EagleReader
from actors.drafters.heads.files import HeadFiles, folder_to_borrow_from, head_folder, read_head
from actors.drafters.heads.projection import DecodedStates, RowProjection, decoded
from actors.drafters.heads.rope import target_shape
from actors.drafters.heads.weight_reader import borrowed_tensors
from actors.drafters.model.draft_cache import DraftCache, FedStates
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.forwards import ONE_AT_A_TIME, MaskTokens
from actors.drafters.model.sampling import Calibration, DraftingLimits
from actors.drafters.products import choose_products
from actors.drafters.registry import DraftSetup
from actors.engine.memory import page_count
from actors.engine.process import device_of
from actors.models.checkpoint import local_folder
from actors.sampling.logits_processors import Maker
from cluster.config import DraftPool
from cluster.config_sections import HeadOptions
from protos.messages import StatesNeeded

log = logging.getLogger(__name__)
UNFED_TOKENS = 1  # each token is paired with the preceding state, so the first token is not fed


def states_needed(draft: DraftPool, target: Path) -> StatesNeeded:
    """Returns the hidden states that the head in `draft.model` reads."""
    _, config = _read(draft, target)
    return config.needs


def load_projection(draft: DraftPool, target: Path, dtype: str, device: torch.device) -> RowProjection:
    """Loads only the head's projection of the target's states.

    It uses the target's dtype, even if the drafter quantizes the head.
    """
    files, config = _read(draft, target)
    return EagleReader(files, target, config, getattr(torch, dtype), device, projection).row_projection()


def _read(draft: DraftPool, target: Path) -> tuple[HeadFiles, EagleConfig]:
    """Reads the head in `draft.model`. Raises ModelError if it does not match the target or its kind is unknown."""
    files = canonical(read_head(head_folder(draft)))
    return files, resolve(files, target_shape(target), overrides_of(draft.eagle))


def create(draft: DraftPool, setup: DraftSetup) -> DecodedStates:
    """Creates the method.

    Raises ModelError if the head in `draft.model` does not match the target or fit on the device.
    """
    device = device_of(draft.resources)
    products = choose_products(draft.eagle.quantization, setup.dtype, device)
    files, config = _read(draft, local_folder(setup.target, with_weights=False))
    sources = {"embed_tokens.weight": config.embedding, "lm_head.weight": config.lm_head}
    own = [name for name, source in sources.items() if source is not WeightSource.TARGET]
    target = folder_to_borrow_from(setup.target, borrowed_tensors(own))
    head = head_of(files, config, target, products.dtype, device, setup.target_tokens.keys(), products.product)
    return deployed(head, draft, draft.eagle, setup)


def deployed(head: EagleHead, draft: DraftPool, options: HeadOptions, setup: DraftSetup) -> DecodedStates:
    """Creates the drafting method of a head, with a cache of the configured size; logs the resolved configuration."""
    log.info("\n".join(head.config.describe()))
    page_size = draft.cache.page_size
    bytes_each = head.page_bytes(page_size)
    share = draft.resources.gpu_share
    pages = page_count(draft.cache, bytes_each, draft.max_sessions, setup.max_context, head.device, share)
    limits = DraftingLimits(options.draft_probs_top_k)
    is_projected = draft.states.projects_at_target(head.config.needs)
    method = eagle_draft_model(
        head, pages, page_size, limits, setup.draft_tokens, is_projected=is_projected, makers=setup.makers
    )
    return decoded(method, setup.states)


def eagle_draft_model(
    head: EagleHead,
    pages: int,
    page_size: int,
    limits: DraftingLimits,
    draft_tokens: int,
    clock: Callable[[], float] = time.monotonic,
    calibration: Calibration | None = None,
    attention: AttentionBackend | None = None,
    is_projected: bool = False,
    makers: Sequence[Maker] = (),
) -> DraftModel:
    """Creates the method with `pages` cache pages; `choose_attention` selects the default `attention`.

    A head with several tokens per forward predicts `draft_tokens`. With `is_projected`, the target has already
    projected the states.
    """
    runner = EagleRunner(head, pages, page_size, attention)
    needs = head.config.needs
    if is_projected:
        needs = StatesNeeded(needs.layers, head.config.hidden)
    project = runner.placed if is_projected else runner.project
    feed = FedStates(needs, project, head.config.max_positions, runner.mask_state)
    token = head.config.mask_token
    masks = ONE_AT_A_TIME if token is None else MaskTokens(token, draft_tokens)
    cache = DraftCache(pages, page_size, UNFED_TOKENS)
    return DraftModel(
        runner, head.token_ids, cache, limits, clock, masks=masks, calibration=calibration, feed=feed, makers=makers
    )
