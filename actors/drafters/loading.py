"""Creates the draft model from a checkpoint and the optional files in its folder.

The folder may contain the most frequent tokens, a recurrent head, mask tokens and a published acceptance rate, to which
drafters compare their own. Another checkpoint of the same shape, such as a further trained version, can replace the
model during drafting. Both checkpoints are in memory until the new one takes over the cache.
"""

import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.attention.sdpa_gather import SdpaGather
from actors.attention.select_backend import attention_shape, choose_attention
from actors.compute.kv_cache import InputRow
from actors.compute.linear import Product
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel, DraftWeights
from actors.drafters.model.forwards import (
    ONE_AT_A_TIME,
    MaskTokens,
    read_frequent_tokens,
    read_mask_tokens,
    reduce_head,
    tokens_per_forward,
)
from actors.drafters.model.recurrent_head import DraftHead, load_recurrent_head
from actors.drafters.model.sampling import OWN_NOISE, Calibration, DraftingLimits, NoiseSource, check_finite
from actors.drafters.products import choose_products
from actors.drafters.registry import DraftSetup, OtherTarget
from actors.drafters.translation.noise import TranslatedNoise
from actors.drafters.translation.pairing import pairing_of, pool_pairing
from actors.engine.memory import Reserve, page_bytes, page_count, weight_bytes
from actors.engine.process import device_of
from actors.engine.runner import ModelRunner
from actors.engine.static_chain import captured_steps
from actors.engine.static_step import Buckets, recording_on
from actors.models.checkpoint import different_ids, load_model, local_folder
from actors.models.decoder import Decoder, decoder_for
from actors.models.layer_subset import context_length
from cluster.config import DraftPool
from cluster.drafting.method import DraftingMethod
from cluster.drafting.translated_method import TranslatedMethod
from cluster.drafting.translation import TranslatedText
from cluster.errors import ModelError

HEAD_TOKENS = 8192  # vocabulary of a recurrent head: the most frequent tokens; it rarely predicts others
OUTCOME_ROWS = 4  # rows per session for which steps are captured
MAX_ROWS = 64  # rows of a captured step; a pass with more rows runs operation by operation
PROBE_TOKENS = 4  # tokens fed to a new checkpoint as a test


def create(draft: DraftPool, setup: DraftSetup) -> DraftingMethod:
    """Creates the method; if a target has another tokenizer than the draft, it translates through text.

    Raises ModelError if the model matches neither the targets nor the device.
    """
    targets = {"": OtherTarget(setup.target, setup.target_tokens), **setup.others}
    pairing = pool_pairing(draft, [one.tokens for one in targets.values()])
    if not pairing.is_translated:
        if any(different_ids(setup.target_tokens, one.tokens) for one in targets.values()):
            raise ModelError(
                f"draft {pairing.draft} has no tokenizer, but its targets have different vocabularies; set"
                " draft.tokenizer to a folder or Hugging Face id with its tokenizer"
            )
        common = set(setup.target_tokens).intersection(*(one.tokens for one in targets.values()))
        shared = replace(setup, target_tokens={token: setup.target_tokens[token] for token in sorted(common)})
        return load_draft_model(pairing.draft, draft, shared, device_of(draft.resources))
    translators = {
        name: pairing.translator(local_folder(one.target, with_weights=False)) for name, one in targets.items()
    }
    own = replace(setup, target_tokens=pairing.draft_tokens(setup.target_tokens), processor_factories=())
    texts: dict[str, TranslatedText] = {}
    model = load_draft_model(pairing.draft, draft, own, device_of(draft.resources), noise=TranslatedNoise(texts))
    return TranslatedMethod(model, lambda opened: translators.get(opened.model, translators[""]), texts)


def load_draft_model(
    folder: Path,
    draft: DraftPool,
    setup: DraftSetup,
    device: torch.device,
    calibration: Calibration | None = None,
    noise: NoiseSource = OWN_NOISE,
) -> DraftModel:
    """Loads a checkpoint as a drafting method. It never proposes token ids unknown to the target."""
    products = choose_products(draft.draft_model.quantization, setup.dtype, device)
    model = load_model(folder, products.dtype_name, device)
    return draft_with(model, products.product, draft, setup, folder, calibration, noise)


def draft_with(
    model: PreTrainedModel,
    product: Product,
    draft: DraftPool,
    setup: DraftSetup,
    beside: Path | None = None,
    calibration: Calibration | None = None,
    noise: NoiseSource = OWN_NOISE,
) -> DraftModel:
    """Creates the method from a loaded model and the optional files in folder `beside`.

    With a folder, checkpoints of the same shape can later replace the model.
    """
    options = draft.draft_model
    successor = 0 if draft.learning is None else weight_bytes(model)
    parts = _parts_of(model, product, setup, beside)
    page_size = draft.cache.page_size
    bytes_each = page_bytes(model, page_size)
    share = draft.resources.gpu_share
    captures = draft.resources.cuda_graphs
    captured_context = setup.max_context if captures else None
    attention, _ = choose_attention(attention_shape(model, page_size), model.device, captured_context)
    # A session has a row for each possible outcome of its verdict.
    rows = min(OUTCOME_ROWS * draft.max_sessions, MAX_ROWS)
    buckets = Buckets.for_sessions(rows, setup.max_context, page_size, attention, draws=False)
    recording = recording_on(model.device, attention, parts.decoder, buckets) if captures else None
    reserve = Reserve.of_steps(
        max(draft.max_sessions * parts.masks.width, buckets.tokens[-1] if recording else 0),
        len(parts.token_ids),
        model.device,
        graphs=len(buckets.shapes) if recording else 0,
        chain_steps=captured_steps(setup.draft_tokens, rows) if recording else 0,
    )
    reserve = replace(reserve, successor=successor)
    pages = page_count(draft.cache, bytes_each, draft.max_sessions, setup.max_context, model.device, share, reserve)
    runner = ModelRunner(
        model, pages, page_size, attention, parts.decoder, context=parts.max_positions, recording=recording
    )
    runner.capture_steps()
    successors = _Successors(draft, setup, model, runner, pages, buckets if runner.is_captured else None)
    limits = DraftingLimits(options.draft_probs_top_k, options.min_confidence, max_positions=parts.max_positions)
    method = DraftModel(
        runner,
        parts.token_ids,
        DraftCache(pages, page_size),
        limits,
        masks=parts.masks,
        head=parts.head,
        calibration=calibration,
        processor_factories=setup.processor_factories,
        load=successors if beside else None,
        noise=noise,
    )
    method.capture_chains(setup.draft_tokens, rows)  # side branches of trees have rows of their own
    return method


@dataclass(frozen=True, slots=True)
class _Parts:
    """A model prepared for drafting; column i of its logits scores `token_ids[i]`."""

    decoder: Decoder
    token_ids: Tensor
    masks: MaskTokens
    head: DraftHead | None
    max_positions: int


def _parts_of(model: PreTrainedModel, product: Product, setup: DraftSetup, beside: Path | None) -> _Parts:
    rows = int(model.config.get_text_config().vocab_size)
    frequent = read_frequent_tokens(beside, rows) if beside else None
    proposable = [token for token in (range(rows) if frequent is None else frequent) if token in setup.target_tokens]
    token_ids = torch.tensor(proposable, device=model.device)
    if proposable != list(range(rows)):
        reduce_head(model, token_ids)
    width = tokens_per_forward(model.config, setup.draft_tokens)
    columns = None if frequent is None else HEAD_TOKENS
    head = load_recurrent_head(beside, model, width, product, columns) if beside else None
    positions = min(context_length(model.config) or setup.max_context, setup.max_context)
    decoder = decoder_for(model.eval(), product, positions)
    masks = ONE_AT_A_TIME if head or not beside else read_mask_tokens(model.config, setup.draft_tokens)
    return _Parts(decoder, token_ids, masks, head, positions)


class _Successors:
    """Loads replacement checkpoints for `model`; they reuse the cache and attention backend of its `runner`.

    Captures each of their steps when it first occurs, if `buckets` are given.
    """

    def __init__(
        self,
        draft: DraftPool,
        setup: DraftSetup,
        model: PreTrainedModel,
        runner: ModelRunner,
        pages: int,
        buckets: Buckets | None,
    ) -> None:
        self._draft = draft
        self._setup = setup
        self._device = model.device
        self._shape = attention_shape(model, draft.cache.page_size)
        self._attention = runner.attention
        self._cache = runner.cache
        self._pages = pages
        self._buckets = buckets

    def __call__(self, folder: Path) -> DraftWeights:
        """Loads, packs and tests a checkpoint. Raises ModelError if it is broken or has the wrong shape."""
        if pairing_of(self._setup.target_tokens, folder).is_translated:
            raise ModelError(f"{folder} has another vocabulary than the draft in use; train it from that draft")
        products = choose_products(self._draft.draft_model.quantization, self._setup.dtype, self._device)
        model = load_model(folder, products.dtype_name, self._device)
        if (shape := attention_shape(model, self._draft.cache.page_size)) != self._shape:
            raise ModelError(
                f"{folder} cannot replace the draft in use: its layers need {shape}, not {self._shape}; train it from"
                " that draft"
            )
        parts = _parts_of(model, products.product, self._setup, folder)
        self._try(folder, model, parts)
        buckets = self._buckets
        runner = ModelRunner(
            model,
            self._pages,
            self._shape.page_size,
            self._attention,
            parts.decoder,
            context=parts.max_positions,
            cache=self._cache,
            recording=recording_on(self._device, self._attention, parts.decoder, buckets) if buckets else None,
        )
        return DraftWeights(runner, parts.token_ids, parts.masks, parts.head, parts.max_positions)

    @torch.inference_mode()
    def _try(self, folder: Path, model: PreTrainedModel, parts: _Parts) -> None:
        """Runs the model on a few tokens with a separate cache. Raises ModelError unless each row of logits has a
        finite maximum.
        """
        pages = -(-PROBE_TOKENS // self._shape.page_size)
        runner = ModelRunner(
            model,
            pages,
            self._shape.page_size,
            SdpaGather(),
            parts.decoder,
            context=parts.max_positions,
        )
        tokens = tuple(islice(self._setup.target_tokens, PROBE_TOKENS))
        output = runner.forward([InputRow(tokens, 0, len(tokens), tuple(range(pages)))])
        found = [output.logits]
        if parts.head is not None:
            assert output.hidden is not None, "a head needs hidden states"
            found.append(parts.head.predict_next(output.hidden, tokens).logits)
        for logits in found:
            check_finite(logits, folder)


FIGURE = "first_token_acceptance"


def published_acceptance(draft: DraftPool) -> float | None:
    """Reads the published acceptance rate of blocks' first tokens from the draft's config.json.

    Returns None without a published rate. Raises ModelError if the rate is outside (0, 1].
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
