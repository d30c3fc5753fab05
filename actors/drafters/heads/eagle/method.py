"""Drafting with an EAGLE head, a draft model that reads the target's hidden states in addition to tokens."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from actors.attention import AttentionBackend
from actors.attention.sdpa_gather import SdpaGather
from actors.compute.kv_cache import InputRow
from actors.compute.linear import PlainProjection, projection
from actors.drafters.heads.eagle.config import (
    GUESSED_STATES,
    EagleConfig,
    WeightSource,
    canonical,
    overrides_of,
    resolve,
)
from actors.drafters.heads.eagle.loading import EagleHead, EagleRunner, attention_shape_of, head_of
from actors.drafters.heads.eagle.weights import EagleReader
from actors.drafters.heads.files import META, HeadFiles, folder_to_borrow_from, head_folder, read_head, read_headers
from actors.drafters.heads.projection import DecodedStates, RowProjection, decoded
from actors.drafters.heads.rope import target_shape
from actors.drafters.heads.weight_reader import borrowed_tensors
from actors.drafters.model.draft_cache import DraftCache, FedStates
from actors.drafters.model.draft_model import DraftModel, DraftWeights
from actors.drafters.model.forwards import ONE_AT_A_TIME, MaskTokens
from actors.drafters.model.sampling import Calibration, DraftingLimits, check_finite
from actors.drafters.products import choose_products
from actors.drafters.registry import DraftSetup
from actors.engine.memory import Reserve, page_count
from actors.engine.process import device_of
from actors.models.checkpoint import local_folder
from actors.sampling.logits_processors import ProcessorFactory
from cluster.config import DraftPool
from cluster.config_sections import HeadOptions
from cluster.errors import ModelError
from protos.messages import StatesNeeded

log = logging.getLogger(__name__)
PROJECTION = ("fc.", "fc_norm.", "input_norm.", "mask_hidden")  # tensors of the projection of the target's states
PROBE_TOKENS = 4  # tokens fed to a head before it replaces another
UNFED_TOKENS = 1  # each token is paired with the preceding state, so the first token is not fed


def states_needed(draft: DraftPool, target: Path) -> StatesNeeded:
    """Returns the hidden states that the head in `draft.model` reads."""
    _, config = _read(draft, target)
    return config.needs


def check_head(draft: DraftPool, target: Path, tokens: Collection[int]) -> None:
    """Runs the head's loader on headers alone. Raises ModelError if the head does not match the target."""
    files = canonical(read_headers(head_folder(draft)))
    config = resolve(files, target_shape(target), overrides_of(draft.eagle))
    EagleReader(files, target, config, torch.float32, META, PlainProjection).weights(tokens)


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
    described = local_folder(setup.target, with_weights=False)
    files, config = _read(draft, described)
    if config.guesses_states:
        log.warning("%s reads the target's states %s: %s", files.folder, list(config.needs.layers), GUESSED_STATES)
    shape = target_shape(described)
    sources = {"embed_tokens.weight": config.embedding, "lm_head.weight": config.lm_head}
    own = [name for name, source in sources.items() if source is not WeightSource.TARGET]
    borrowed_bytes = (len(sources) - len(own)) * shape.vocabulary * shape.hidden * products.dtype.itemsize
    own_bytes = sum(tensor.nbytes for tensor in files.tensors.values())
    target = folder_to_borrow_from(setup.target, borrowed_tensors(own))

    def load(files: HeadFiles) -> EagleHead:
        return head_of(files, config, target, products.dtype, device, setup.target_tokens.keys(), products.product)

    def load_other(folder: Path) -> EagleHead:
        other = canonical(read_head(folder))
        check_replaces(other, files)
        if resolve(other, shape, overrides_of(draft.eagle)) != config:
            raise ModelError(f"{folder} cannot replace the head in use: its configuration differs; train it from that")
        return load(other)

    successor = 0 if draft.learning is None else own_bytes + borrowed_bytes
    return deployed(load(files), draft, draft.eagle, setup, load_other, successor)


def check_replaces(files: HeadFiles, used: HeadFiles) -> None:
    """Raises ModelError if a head projects the target's states otherwise than the head in use.

    The target may compute the projection, and open sessions keep states that were projected before an exchange.
    """
    for name, tensor in used.tensors.items():
        if name.startswith(PROJECTION) and not torch.equal(tensor, files.tensor(name, tuple(tensor.shape))):
            raise ModelError(
                f"{files.folder} cannot replace the head in use: it projects the target's states otherwise ({name});"
                " train it from the head in draft.model"
            )


def _check_logits(head: EagleHead, folder: Path, page_size: int) -> None:
    """Feeds a few tokens to the head in a folder. Raises ModelError if it computes NaN or infinite logits."""
    tokens = tuple(head.token_ids[:PROBE_TOKENS].tolist())
    pages = -(-PROBE_TOKENS // page_size)
    states = torch.ones(len(tokens), head.config.hidden, dtype=head.dtype, device=head.device)
    row = InputRow(tokens, 0, len(tokens), tuple(range(pages)), states=states)
    check_finite(EagleRunner(head, pages, page_size, SdpaGather()).forward([row]).logits, folder)


def deployed(
    head: EagleHead,
    draft: DraftPool,
    options: HeadOptions,
    setup: DraftSetup,
    load: Callable[[Path], EagleHead] | None = None,
    successor: int = 0,
) -> DecodedStates:
    """Creates the drafting method of a head, with a cache of the configured size; logs the resolved configuration.

    `load` loads a head that may replace this one, and needs `successor` bytes of memory; it raises ModelError for
    others.
    """
    log.info("\n".join(head.config.describe()))
    page_size = draft.cache.page_size
    bytes_each = attention_shape_of(head, page_size).page_bytes
    if draft.cache.gib is None:
        # The target's states share the free memory with the pages; when their memory is full, it doubles.
        bytes_each += 2 * page_size * head.config.hidden * head.dtype.itemsize
    share = draft.resources.gpu_share
    reserve = replace(Reserve.of_steps(draft.max_sessions, len(head.token_ids), head.device), successor=successor)
    pages = page_count(draft.cache, bytes_each, draft.max_sessions, setup.max_context, head.device, share, reserve)
    limits = DraftingLimits(options.draft_probs_top_k)
    is_projected = draft.states.projects_at_target(head.config.needs)
    method = eagle_draft_model(
        head,
        pages,
        page_size,
        limits,
        setup.draft_tokens,
        is_projected=is_projected,
        processor_factories=setup.processor_factories,
        load=load,
    )
    return decoded(method, setup, max_states=None if draft.cache.gib is not None else pages * page_size)


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
    processor_factories: Sequence[ProcessorFactory] = (),
    load: Callable[[Path], EagleHead] | None = None,
) -> DraftModel:
    """Creates the method with `pages` cache pages; `choose_attention` selects the default `attention`.

    A head with several tokens per forward predicts `draft_tokens`. With `is_projected`, the target has already
    projected the states.
    """
    runner = EagleRunner(head, pages, page_size, attention)
    needs = head.config.needs
    if is_projected:
        needs = StatesNeeded(needs.layers, head.config.hidden)
    inputs = replace(head.inputs, projection=None) if is_projected else head.inputs
    feed = FedStates(needs, inputs, head.config.max_positions, head.mask_state)
    token = head.config.mask_token
    masks = ONE_AT_A_TIME if token is None else MaskTokens(token, draft_tokens)
    cache = DraftCache(pages, page_size, UNFED_TOKENS)
    backend, memory = runner.attention, runner.cache  # a reference to the runner would keep its head after an exchange

    def load_weights(folder: Path) -> DraftWeights:
        assert load is not None, "it is passed on only if there is one"
        other = load(folder)
        _check_logits(other, folder, page_size)
        return DraftWeights(EagleRunner(other, pages, page_size, backend, memory), other.token_ids, masks)

    return DraftModel(
        runner,
        head.token_ids,
        cache,
        limits,
        clock,
        masks=masks,
        calibration=calibration,
        feed=feed,
        processor_factories=processor_factories,
        load=None if load is None else load_weights,
    )
